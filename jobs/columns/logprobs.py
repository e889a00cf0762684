"""Log-probabilities of the chosen tokens, and of the most likely ones."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from jobs.columns.column import Column, ColumnArray, alternatives, output_field, ragged
from jobs.completion import Completion
from jobs.plan import Plan

_DISTRIBUTION = (
    "of the whole vocabulary after penalties and the min_new_tokens mask, "
    "before temperature, top_k, top_p and min_p"
)


def _fields(plan: Plan) -> list[pa.Field]:
    count = plan.job.logprobs
    if count is None:
        return []
    fields = [
        output_field(
            "logprobs",
            pa.large_list(pa.field("element", pa.float32(), nullable=False)),
            f"log-probability of each new token, {_DISTRIBUTION}",
            unit="nats",
        ),
        output_field("cumulative_logprob", pa.float64(), "sum of logprobs, in order", unit="nats"),
    ]
    if count:
        ids, logprobs = alternatives(pa.int32(), count), alternatives(pa.float32(), count)
        fields += [
            output_field(
                "top_ids",
                pa.large_list(pa.field("element", ids, nullable=False)),
                f"the {count} most likely tokens at each step, most likely first",
            ),
            output_field(
                "top_logprobs",
                pa.large_list(pa.field("element", logprobs, nullable=False)),
                f"log-probabilities of top_ids, {_DISTRIBUTION}",
                unit="nats",
            ),
        ]
    return fields


def _arrays(plan: Plan, completions: Sequence[Completion]) -> list[ColumnArray]:
    count = plan.job.logprobs
    if count is None:
        return []
    logprobs = [completion.logprobs for completion in completions]
    sums = [None if row is None else sum(row.astype(np.float64).tolist()) for row in logprobs]
    arrays: list[ColumnArray] = [ragged(logprobs, pa.float32()), pa.array(sums, pa.float64())]
    if count:
        top_ids = [completion.top_ids for completion in completions]
        top_logprobs = [completion.top_logprobs for completion in completions]
        arrays += [
            ragged(top_ids, alternatives(pa.int32(), count)),
            ragged(top_logprobs, alternatives(pa.float32(), count)),
        ]
    return arrays


COLUMN = Column(_fields, _arrays)
