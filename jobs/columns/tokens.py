"""The answer as token ids, which are the truth, and how many tokens there are."""

from collections.abc import Sequence

import pyarrow as pa

from jobs.columns.column import Column, ColumnArray, output_field, ragged
from jobs.completion import Completion
from jobs.plan import Plan


def _fields(plan: Plan) -> list[pa.Field]:
    return [
        output_field(
            "token_ids",
            pa.large_list(pa.field("element", pa.int32(), nullable=False)),
            "the new tokens, the one that ended the row included",
        ),
        output_field("num_prompt_tokens", pa.int32(), "tokens of the prompt as it was run"),
        output_field("num_generated_tokens", pa.int32(), "length of token_ids"),
    ]


def _arrays(plan: Plan, completions: Sequence[Completion]) -> list[ColumnArray]:
    token_ids = [completion.token_ids for completion in completions]
    return [
        ragged(token_ids, pa.int32()),
        pa.array([completion.num_prompt_tokens for completion in completions], pa.int32()),
        pa.array([None if ids is None else len(ids) for ids in token_ids], pa.int32()),
    ]


COLUMN = Column(_fields, _arrays)
