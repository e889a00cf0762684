"""A column of token ids: each cell is a prompt that is tokenized already."""

import pyarrow as pa

from jobs.completion import RowError
from jobs.kinds.kind import Kind, PromptValue


def _accepts(type_: pa.DataType) -> bool:
    if pa.types.is_null(type_):
        return True
    is_list: bool = (
        pa.types.is_list(type_)
        or pa.types.is_large_list(type_)
        or pa.types.is_fixed_size_list(type_)
        or pa.types.is_list_view(type_)
        or pa.types.is_large_list_view(type_)
    )
    if not is_list:
        return False
    is_read: bool = pa.types.is_integer(type_.value_type) or pa.types.is_null(type_.value_type)
    return is_read


def _read(column: pa.ChunkedArray) -> list[PromptValue]:
    return [_value(token_ids) for token_ids in column.to_pylist()]


def _value(token_ids: list[int | None] | None) -> PromptValue:
    if token_ids is None:
        return RowError("prompt", "null_prompt", "The prompt is null.")
    if not token_ids:
        return RowError("prompt", "empty_prompt", "The prompt is empty.")
    present = tuple(token_id for token_id in token_ids if token_id is not None)
    if len(present) < len(token_ids):
        place = token_ids.index(None)
        return RowError("prompt", "invalid_token_id", f"The token id at place {place} is null.")
    return present


KIND = Kind(
    default_column="prompt_token_ids",
    wanted="lists of integers",
    needs_tokenizer=False,
    accepts=_accepts,
    read=_read,
)
