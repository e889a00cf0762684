"""The shape of a kind: which column it wants, and how a value of it is read."""

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from jobs.completion import RowError

PromptValue = str | tuple[int, ...] | RowError
"""What a row's cell holds: text, token ids, or the reason why it is neither."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One way for a row to hold a prompt."""

    default_column: str
    "The column that is taken, by exact name, when the job names none."
    wanted: str
    "What the column must hold, in words."
    needs_tokenizer: bool
    accepts: Callable[[pa.DataType], bool]
    "True if a column of this type can be read."
    read: Callable[[pa.ChunkedArray], list[PromptValue]]
    "One value for each row, in order. Never raises for a bad cell."
