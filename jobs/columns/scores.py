"""How likely the row's text or continuation is: its sum, and by what it can be divided."""

from collections.abc import Sequence

import pyarrow as pa

from jobs.columns.column import Column, ColumnArray, output_field
from jobs.completion import Completion
from jobs.plan import Plan


def _fields(plan: Plan) -> list[pa.Field]:
    if plan.kind == "choices":
        return []
    scored = "text" if plan.kind == "texts" else "continuation"
    return [
        output_field(
            "loglikelihood",
            pa.float64(),
            f"sum of the log-probabilities of the {scored}'s tokens",
            unit="nats",
        ),
        output_field("is_greedy", pa.bool_(), f"true if greedy decoding would write the {scored}"),
        output_field("num_scored_tokens", pa.int32(), "tokens in the sum"),
        output_field(
            "num_scored_bytes", pa.int64(), f"of the {scored}'s UTF-8; null for token ids"
        ),
        output_field(
            "num_scored_words",
            pa.int64(),
            f"stretches of the {scored} without white space; null for token ids",
        ),
    ]


def _arrays(plan: Plan, completions: Sequence[Completion]) -> list[ColumnArray]:
    if plan.kind == "choices":
        return []
    scores = [None if c.scores is None else c.scores.targets[0] for c in completions]
    return [
        pa.array([None if s is None else s.loglikelihood for s in scores], pa.float64()),
        pa.array([None if s is None else s.is_greedy for s in scores], pa.bool_()),
        pa.array([None if s is None else s.num_tokens for s in scores], pa.int32()),
        pa.array([None if s is None else s.num_bytes for s in scores], pa.int64()),
        pa.array([None if s is None else s.num_words for s in scores], pa.int64()),
    ]


COLUMN = Column(_fields, _arrays)
