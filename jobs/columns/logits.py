"""Raw logits, a row of the vocabulary's width for each token that is new or was scored."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from jobs.columns.column import Column, ColumnArray, output_field, ragged
from jobs.completion import Completion
from jobs.plan import Plan


def _vector(plan: Plan) -> pa.DataType:
    value_type = pa.float16() if plan.job.logits_dtype == "float16" else pa.float32()
    return pa.list_(pa.field("element", value_type, nullable=False), plan.facts.vocab_size)


def _fields(plan: Plan) -> list[pa.Field]:
    if not plan.job.output_logits:
        return []
    which = "new token" if plan.job.scoring is None else "token that was scored"
    return [
        output_field(
            "logits",
            # A plain list's int32 offsets overflow at 2**31 numbers: 43,690 tokens of 49,152.
            pa.large_list(pa.field("element", _vector(plan), nullable=False)),
            f"raw output of the model for each {which}, before penalties, masks and temperature",
            storage="plain",
        )
    ]


def _arrays(plan: Plan, completions: Sequence[Completion]) -> list[ColumnArray]:
    """One chunk a row: the numbers are handed over where they lie, not copied together."""
    if not plan.job.output_logits:
        return []
    dtype = np.float16 if plan.job.logits_dtype == "float16" else np.float32
    vector = _vector(plan)
    with np.errstate(over="ignore"):  # float16 ends at 65,504; beyond is infinite, as documented.
        chunks = [
            ragged([None if c.logits is None else c.logits.astype(dtype, copy=False)], vector)
            for c in completions
        ]
    return [pa.chunked_array(chunks, type=_fields(plan)[0].type)]


COLUMN = Column(_fields, _arrays)
