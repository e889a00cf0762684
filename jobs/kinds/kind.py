"""The shape of a kind: which columns it wants, and how their cells are read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from jobs.completion import RowError
from jobs.scoring import Given, Question

PromptValue = Given | Question | RowError
"""What a row holds: text, token ids, what is to be scored, or the reason why it is none of them."""

Columns = Mapping[str, pa.ChunkedArray]
"By the job's field that names the column."


@dataclass(frozen=True, slots=True)
class Cells:
    """What one of a kind's columns must hold."""

    default_column: str | None
    "The column that is taken, by exact name, when the job names none. None: none is taken."
    wanted: str
    "What the column must hold, in words."
    accepts: Callable[[pa.DataType], bool]
    "True if a column of this type can be read."
    holds_text: Callable[[pa.DataType], bool]
    "True if a tokenizer is needed for what such a column holds."


@dataclass(frozen=True, slots=True)
class Kind:
    """One way for rows to hold what is asked."""

    columns: Mapping[str, Cells]
    "By the job's field that names the column. Those without a default may be absent."
    read: Callable[[Columns], list[PromptValue]]
    "One value for each row, in order. Never raises for a bad cell."
