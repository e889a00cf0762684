"""Cells that hold text or token ids, alone or in lists."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from jobs.completion import ErrorCode, RowError
from jobs.scoring import Chat, Given


def refuse(code: ErrorCode, message: str) -> RowError:
    """The error of a row that holds nothing to be run."""
    return RowError("prompt", code, message)


def is_text(type_: pa.DataType) -> bool:
    """True for a column of text, of whatever kind."""
    if pa.types.is_dictionary(type_):
        return is_text(type_.value_type)
    found: bool = (
        pa.types.is_string(type_)
        or pa.types.is_large_string(type_)
        or pa.types.is_string_view(type_)
    )
    return found


def is_list(type_: pa.DataType) -> bool:
    """True for a column of lists, of whatever kind."""
    found: bool = (
        pa.types.is_list(type_)
        or pa.types.is_large_list(type_)
        or pa.types.is_fixed_size_list(type_)
        or pa.types.is_list_view(type_)
        or pa.types.is_large_list_view(type_)
    )
    return found


def is_null(type_: pa.DataType) -> bool:
    """True for a column that holds nulls alone."""
    found: bool = pa.types.is_null(type_)
    return found


def is_ids(type_: pa.DataType) -> bool:
    """True for a column of lists of integers."""
    if not is_list(type_):
        return False
    found: bool = pa.types.is_integer(type_.value_type) or pa.types.is_null(type_.value_type)
    return found


def is_given(type_: pa.DataType) -> bool:
    """True for a column of text or of token ids."""
    return is_null(type_) or is_text(type_) or is_ids(type_)


def read_given(column: pa.ChunkedArray, what: str) -> list[Given | RowError]:
    """Text or token ids of each row, which may be empty, or why there are none."""
    return [
        value if isinstance(value, RowError) else check_given(value, what)
        for value in read_cells(column, what)
    ]


def is_messages(type_: pa.DataType) -> bool:
    """True for a column of conversations: lists of a role and a content."""
    if not is_list(type_) or not pa.types.is_struct(type_.value_type):
        return False
    fields = {field.name: field.type for field in type_.value_type}
    return fields.keys() == {"role", "content"} and all(map(is_text, fields.values()))


def read_contexts(column: pa.ChunkedArray) -> list[Given | Chat | RowError]:
    """The same of contexts, which may be conversations, too."""
    if not is_messages(column.type):
        return [*read_given(column, "context")]
    return [
        value if isinstance(value, RowError) else _check_chat(value)
        for value in read_cells(column, "context")
    ]


def _check_chat(value: Sequence[Mapping[str, str | None] | None] | None) -> Chat | RowError:
    if value is None:
        return refuse("null_prompt", "The context is null.")
    if not value:
        return refuse("invalid_messages", "The context has no message.")
    messages = []
    for place, message in enumerate(value):
        role, content = (message or {}).get("role"), (message or {}).get("content")
        if role is None or content is None:
            return refuse("invalid_messages", f"The message at place {place} has a null in it.")
        messages.append((role, content))
    return Chat(tuple(messages))


def read_cells(column: pa.ChunkedArray, what: str) -> Sequence[Any | RowError]:
    """Each cell as Python has it, or an error where its bytes are no text."""
    try:
        cells: Sequence[Any] = column.to_pylist()
    except UnicodeDecodeError:
        # One row with broken bytes must not cost the others: take the rows one by one.
        return [_read_cell(cell, what) for cell in column]
    return cells


def check_given(value: str | Sequence[int | None] | None, what: str) -> Given | RowError:
    """A cell's text or token ids. what: names the cell in the error."""
    if value is None:
        return refuse("null_prompt", f"The {what} is null.")
    if isinstance(value, str):
        return value
    token_ids = tuple(token_id for token_id in value if token_id is not None)
    if len(token_ids) < len(value):
        return refuse("invalid_token_id", f"The token id at place {value.index(None)} is null.")
    return token_ids


def find_stranger(token_ids: Sequence[int], vocab_size: int) -> RowError | None:
    """The error of a row with an id that the model does not know, if it has one."""
    for place, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            said = f"The token id at place {place} is {token_id}; the model knows 0 to "
            return refuse("invalid_token_id", f"{said}{vocab_size - 1}.")
    return None


def _read_cell(cell: pa.Scalar, what: str) -> Any | RowError:
    try:
        return cell.as_py()
    except UnicodeDecodeError as error:
        return refuse("wrong_type", f"The {what} is no valid UTF-8: {error}.")
