"""The answer as text."""

from collections.abc import Sequence

import pyarrow as pa

from jobs.columns.column import Column, ColumnArray, output_field
from jobs.completion import Completion
from jobs.plan import Plan


def _fields(plan: Plan) -> list[pa.Field]:
    meaning = "the new tokens decoded together, special tokens left out; null without a tokenizer"
    return [output_field("text", pa.large_string(), meaning)]


def _arrays(plan: Plan, completions: Sequence[Completion]) -> list[ColumnArray]:
    return [pa.array([completion.text for completion in completions], pa.large_string())]


COLUMN = Column(_fields, _arrays)
