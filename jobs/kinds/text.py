"""A column of text: each cell is a prompt."""

import pyarrow as pa

from jobs.completion import RowError
from jobs.kinds.kind import Kind, PromptValue


def _accepts(type_: pa.DataType) -> bool:
    if pa.types.is_dictionary(type_):
        return _accepts(type_.value_type)
    is_text: bool = (
        pa.types.is_string(type_)
        or pa.types.is_large_string(type_)
        or pa.types.is_string_view(type_)
        or pa.types.is_null(type_)
    )
    return is_text


def _read(column: pa.ChunkedArray) -> list[PromptValue]:
    try:
        return [_value(text) for text in column.to_pylist()]
    except UnicodeDecodeError:
        # One row with broken bytes must not cost the others: take the rows one by one.
        return [_value_of_cell(cell) for cell in column]


def _value_of_cell(cell: pa.Scalar) -> PromptValue:
    try:
        return _value(cell.as_py())
    except UnicodeDecodeError as error:
        return RowError("prompt", "wrong_type", f"The prompt is no valid UTF-8: {error}.")


def _value(text: str | None) -> PromptValue:
    if text is None:
        return RowError("prompt", "null_prompt", "The prompt is null.")
    if not text:
        return RowError("prompt", "empty_prompt", "The prompt is empty.")
    return text


KIND = Kind(
    default_column="prompt",
    wanted="text",
    needs_tokenizer=True,
    accepts=_accepts,
    read=_read,
)
