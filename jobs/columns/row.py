"""Which row this is: row_id and sample_index."""

from collections.abc import Sequence

import pyarrow as pa

from jobs.columns.column import Column, ColumnArray, output_field
from jobs.completion import Completion
from jobs.plan import Plan


def _fields(plan: Plan) -> list[pa.Field]:
    return [
        output_field(
            "row_id",
            pa.int64(),
            "place of the row in the input, over all files in name order, from 0",
            nullable=False,
        ),
        output_field(
            "sample_index", pa.int32(), "which of the row's answers this is, from 0", nullable=False
        ),
    ]


def _arrays(plan: Plan, completions: Sequence[Completion]) -> list[ColumnArray]:
    return [
        pa.array([completion.row_id for completion in completions], pa.int64()),
        pa.array([0] * len(completions), pa.int32()),
    ]


COLUMN = Column(_fields, _arrays)
