"""The tokens that were scored, each with its log-probability."""

from collections.abc import Sequence

import pyarrow as pa

from jobs.columns.column import Column, ColumnArray, output_field, ragged
from jobs.completion import Completion
from jobs.plan import Plan


def _fields(plan: Plan) -> list[pa.Field]:
    if not _is_asked(plan):
        return []
    whose = "of all choices, one after the other" if plan.kind == "choices" else "in order"
    return [
        output_field(
            "token_ids",
            pa.large_list(pa.field("element", pa.int32(), nullable=False)),
            f"the tokens that were scored, {whose}",
        ),
        output_field(
            "logprobs",
            pa.large_list(pa.field("element", pa.float32(), nullable=False)),
            "log-probability of each of token_ids, of the raw logits over the whole vocabulary",
            unit="nats",
        ),
    ]


def _arrays(plan: Plan, completions: Sequence[Completion]) -> list[ColumnArray]:
    if not _is_asked(plan):
        return []
    return [
        ragged([completion.token_ids for completion in completions], pa.int32()),
        ragged([completion.logprobs for completion in completions], pa.float32()),
    ]


def _is_asked(plan: Plan) -> bool:
    return plan.job.scoring is not None and plan.job.scoring.token_logprobs


COLUMN = Column(_fields, _arrays)
