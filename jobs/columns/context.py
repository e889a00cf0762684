"""What stood before that which was scored: its length, and whether it was cut."""

from collections.abc import Sequence

import pyarrow as pa

from jobs.columns.column import Column, ColumnArray, output_field
from jobs.completion import Completion
from jobs.plan import Plan


def _fields(plan: Plan) -> list[pa.Field]:
    return [
        output_field("num_prompt_tokens", pa.int32(), "tokens of the context as it was run"),
        output_field("truncated", pa.bool_(), "true if the context was cut to fit", nullable=False),
    ]


def _arrays(plan: Plan, completions: Sequence[Completion]) -> list[ColumnArray]:
    return [
        pa.array([completion.num_prompt_tokens for completion in completions], pa.int32()),
        pa.array([completion.truncated for completion in completions], pa.bool_()),
    ]


COLUMN = Column(_fields, _arrays)
