"""How the row began and ended: finish_reason, stop_reason, truncated, seed."""

from collections.abc import Sequence

import pyarrow as pa

from jobs.columns.column import Column, ColumnArray, output_field
from jobs.completion import Completion
from jobs.plan import Plan


def _fields(plan: Plan) -> list[pa.Field]:
    return [
        output_field("finish_reason", pa.string(), "stop, length, abort or error", nullable=False),
        output_field("stop_reason", pa.string(), "the stop id that ended the row; null for EOS"),
        output_field("truncated", pa.bool_(), "true if the prompt was cut to fit", nullable=False),
        output_field(
            "seed", pa.uint64(), "the row's own seed: generate() with it repeats the row alone"
        ),
    ]


def _arrays(plan: Plan, completions: Sequence[Completion]) -> list[ColumnArray]:
    return [
        pa.array([completion.finish_reason for completion in completions], pa.string()),
        pa.array([completion.stop_reason for completion in completions], pa.string()),
        pa.array([completion.truncated for completion in completions], pa.bool_()),
        pa.array([completion.seed for completion in completions], pa.uint64()),
    ]


COLUMN = Column(_fields, _arrays)
