"""Why a row has no answer; null when all is well."""

import dataclasses
from collections.abc import Sequence

import pyarrow as pa

from jobs.columns.column import Column, ColumnArray, output_field
from jobs.completion import Completion
from jobs.plan import Plan

ERROR_TYPE = pa.struct(
    [
        pa.field("stage", pa.string()),
        pa.field("code", pa.string()),
        pa.field("message", pa.large_string()),
        pa.field("attempts", pa.int32()),
        pa.field("retryable", pa.bool_()),
    ]
)


def _fields(plan: Plan) -> list[pa.Field]:
    return [output_field("error", ERROR_TYPE, "why the row has no answer; null if it has one")]


def _arrays(plan: Plan, completions: Sequence[Completion]) -> list[ColumnArray]:
    errors = [
        None if completion.error is None else dataclasses.asdict(completion.error)
        for completion in completions
    ]
    return [pa.array(errors, ERROR_TYPE)]


COLUMN = Column(_fields, _arrays)
