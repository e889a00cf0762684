"""Log-probabilities of the prompt's own tokens, and of the most likely ones at their places."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jobs.columns.column import Column, ColumnArray, alternatives, output_field, ragged
from jobs.completion import Completion
from jobs.plan import Plan

_OF = "of the raw logits over the whole vocabulary; null for the first, which follows nothing"


def _fields(plan: Plan) -> list[pa.Field]:
    number = plan.job.prompt_logprobs
    if number is None:
        return []
    ids = pa.large_list(pa.field("element", pa.int32(), nullable=False))
    fields = [
        output_field("prompt_token_ids", ids, "the tokens of the prompt as it was run"),
        output_field(
            "prompt_logprobs",
            pa.large_list(pa.field("element", pa.float32())),
            f"log-probability of each of prompt_token_ids, {_OF}",
            unit="nats",
        ),
    ]
    if number:
        fields += [
            output_field(
                "prompt_top_ids",
                pa.large_list(pa.field("element", alternatives(pa.int32(), number))),
                f"the {number} most likely tokens at each place, most likely first; null for the "
                "first place",
            ),
            output_field(
                "prompt_top_logprobs",
                pa.large_list(pa.field("element", alternatives(pa.float32(), number))),
                f"log-probabilities of prompt_top_ids, {_OF}",
                unit="nats",
            ),
        ]
    return fields


def _arrays(plan: Plan, completions: Sequence[Completion]) -> list[ColumnArray]:
    number = plan.job.prompt_logprobs
    if number is None:
        return []
    scores = [completion.prompt_scores for completion in completions]
    arrays: list[ColumnArray] = [
        ragged([None if s is None else s.token_ids for s in scores], pa.int32()),
        _behind_null([None if s is None else s.logprobs for s in scores], pa.float32()),
    ]
    if number:
        ids, logprobs = alternatives(pa.int32(), number), alternatives(pa.float32(), number)
        arrays += [
            _behind_null([None if s is None else s.top_ids for s in scores], ids),
            _behind_null([None if s is None else s.top_logprobs for s in scores], logprobs),
        ]
    return arrays


def _behind_null(
    rows: Sequence[npt.NDArray[np.generic] | None], value_type: pa.DataType
) -> pa.LargeListArray:
    """Lists that begin with a null, and go on with the rows' entries."""
    lengths = [0 if row is None else 1 + len(row) for row in rows]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    is_first = np.zeros(offsets[-1], np.bool_)
    is_first[offsets[:-1][np.array(lengths, np.int64) > 0]] = True
    is_list = pa.types.is_fixed_size_list(value_type)
    width = value_type.list_size if is_list else 1
    present = [row.reshape(len(row), width) for row in rows if row is not None]
    flat = np.zeros((len(is_first), width), present[0].dtype if present else np.int8)
    if present:
        flat[~is_first] = np.concatenate(present)
    if is_list:
        items = pa.array(flat.reshape(-1), type=value_type.value_type)
        values: pa.Array = pa.FixedSizeListArray.from_arrays(
            items, type=value_type, mask=pa.array(is_first)
        )
    else:
        values = pa.array(flat.reshape(-1), type=value_type, mask=is_first)
    return pa.LargeListArray.from_arrays(
        pa.array(offsets),
        values,
        type=pa.large_list(pa.field("element", value_type)),
        mask=pa.array([row is None for row in rows], pa.bool_()),
    )


COLUMN = Column(_fields, _arrays)
