"""How likely each of the row's choices is, and which of them is the likeliest, four ways."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from jobs.columns.column import Column, ColumnArray, output_field
from jobs.completion import Completion
from jobs.plan import Plan
from jobs.scoring import PREDICTIONS, Scores


def _list(value_type: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", value_type))


def _fields(plan: Plan) -> list[pa.Field]:
    if plan.kind != "choices":
        return []
    fields = [
        output_field(
            "choice_loglikelihoods",
            _list(pa.float64()),
            "of each choice, the sum of the log-probabilities of its tokens behind the context",
            unit="nats",
        ),
        output_field(
            "choice_is_greedy", _list(pa.bool_()), "true if greedy decoding would write the choice"
        ),
        output_field("choice_num_tokens", _list(pa.int32()), "tokens in each sum"),
        output_field(
            "choice_num_bytes",
            _list(pa.int64()),
            "of each choice's UTF-8; null for token ids",
        ),
    ]
    if _is_pmi(plan):
        fields.append(
            output_field(
                "choice_unconditional_loglikelihoods",
                _list(pa.float64()),
                "the same sums without the context",
                unit="nats",
            )
        )
    return fields + [
        output_field(way, pa.int32(), f"the choice with the {meaning}")
        for way, meaning in _predictions(plan).items()
    ]


def _arrays(plan: Plan, completions: Sequence[Completion]) -> list[ColumnArray]:
    if plan.kind != "choices":
        return []

    def of(value: Callable[[Scores], Any], type_: pa.DataType) -> pa.Array:
        return pa.array([None if c.scores is None else value(c.scores) for c in completions], type_)

    arrays: list[ColumnArray] = [
        of(lambda s: [target.loglikelihood for target in s.targets], _list(pa.float64())),
        of(lambda s: [target.is_greedy for target in s.targets], _list(pa.bool_())),
        of(lambda s: [target.num_tokens for target in s.targets], _list(pa.int32())),
        of(lambda s: [target.num_bytes for target in s.targets], _list(pa.int64())),
    ]
    if _is_pmi(plan):
        arrays.append(of(lambda s: list(s.unconditional), _list(pa.float64())))
    return arrays + [
        of(partial(Scores.predicted, way=way), pa.int32()) for way in _predictions(plan)
    ]


def _is_pmi(plan: Plan) -> bool:
    return plan.job.scoring is not None and plan.job.scoring.pmi


def _predictions(plan: Plan) -> dict[str, str]:
    """Those that can be made, by the ending of their column."""
    return {
        way: said
        for way, said in PREDICTIONS.items()
        if way != "predicted_choice_pmi" or _is_pmi(plan)
    }


COLUMN = Column(_fields, _arrays)
