"""Rows that hold a prompt, as text or as token ids: one column each."""

from jobs.completion import RowError
from jobs.kinds.given import is_ids, is_null, is_text, read_given, refuse
from jobs.kinds.kind import Cells, Columns, Kind, PromptValue


def _read(columns: Columns) -> list[PromptValue]:
    [column] = columns.values()
    return [
        value if value or isinstance(value, RowError) else _EMPTY
        for value in read_given(column, "prompt")
    ]


_EMPTY = refuse("empty_prompt", "The prompt is empty.")

TEXT = Kind(
    columns={
        "prompt_column": Cells(
            "prompt", "text", lambda type_: is_text(type_) or is_null(type_), lambda _: True
        )
    },
    read=_read,
)
TOKEN_IDS = Kind(
    columns={
        "token_ids_column": Cells(
            "prompt_token_ids",
            "lists of integers",
            lambda type_: is_ids(type_) or is_null(type_),
            lambda _: False,
        )
    },
    read=_read,
)
