"""Two outputs side by side, row by row: what differs, from where on, and by how much."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from jobs.cells import equal_cells, greatest_difference
from jobs.parts import PartReader, part_num_rows, part_schema, part_size, same_bytes
from jobs.scoring import SUMS
from jobs.storage import name_of

_ROWS_AT_A_TIME = 1024
_BYTES_AT_A_TIME = 64 * 2**20
"Of files, where rows are large."


@dataclass(frozen=True, slots=True)
class RowDifference:
    """A row whose tokens differ."""

    row_id: int
    place: int
    "Of the first new token that differs; the length of the shorter answer if it goes on in one."
    a: int | None
    "Token id in the first output; None if the answer has ended."
    b: int | None


@dataclass(slots=True)
class Comparison:
    """What differs between two outputs."""

    rows_a: int
    rows_b: int
    rows_compared: int = 0
    rows_differing: int = 0
    "Rows of which any value differs."
    columns_differing: Counter[str] = field(default_factory=Counter)
    "By column of both, the rows in which it differs."
    columns_of_one: list[str] = field(default_factory=list)
    "Columns that only one of the two has, or has with another type."
    tokens_differing: list[RowDifference] = field(default_factory=list)
    "In row order."
    logprob_difference: float = 0.0
    "The greatest, in nats, of tokens up to the first that differs, and of sums."
    logprob_row: int | None = None
    "Where that is."

    @property
    def is_same(self) -> bool:
        """True if every value of every row is equal."""
        return not (self.rows_differing or self.columns_of_one or self.rows_a != self.rows_b)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two outputs."""

    paths: Sequence[str]
    "All its parts, in row order; at least one."
    prefix: str
    "Stands before the names of our columns."
    kept_columns: Collection[str]
    "The input's columns, which may be called anything."

    @property
    def num_rows(self) -> int:
        """Rows in all parts."""
        return sum(part_num_rows(path) for path in self.paths)

    def types(self) -> dict[str, pa.DataType]:
        """Columns by the names that both sides share, and their types."""
        return {self._shared(field.name): field.type for field in part_schema(self.paths[0])}

    def rows_at_a_time(self) -> int:
        """As many as memory holds with ease."""
        size = sum(part_size(path) for path in self.paths) // max(self.num_rows, 1)
        return max(1, min(_ROWS_AT_A_TIME, _BYTES_AT_A_TIME // max(size, 1)))

    def read(self, num_rows: int) -> Iterator[pa.Table]:
        """All rows, so many at a time."""
        held: list[pa.Table] = []
        for path in self.paths:
            reader, left = PartReader(path), part_num_rows(path)
            while left:
                wanted = min(left, num_rows - sum(table.num_rows for table in held))
                held.append(self._plain(reader.read(wanted)))
                left -= wanted
                if sum(table.num_rows for table in held) == num_rows:
                    yield pa.concat_tables(held)
                    held = []
        if held:
            yield pa.concat_tables(held)

    def _plain(self, table: pa.Table) -> pa.Table:
        """Under the shared names, and with words instead of their numbers in a dictionary."""
        columns = {}
        for name, column in zip(table.column_names, table.columns, strict=True):
            is_coded = pa.types.is_dictionary(column.type)
            columns[self._shared(name)] = (
                column.cast(column.type.value_type) if is_coded else column
            )
        return pa.table(columns)

    def _shared(self, name: str) -> str:
        if name in self.kept_columns:
            return f"input column {name}"
        return name.removeprefix(self.prefix)


def compare_outputs(a: Side, b: Side) -> Comparison:
    """Goes through both, from front to back. Row k of one is compared with row k of the other."""
    comparison = Comparison(a.num_rows, b.num_rows)
    types_a, types_b = a.types(), b.types()
    shared = [name for name in types_a if types_a[name] == types_b.get(name)]
    comparison.columns_of_one = sorted({*types_a, *types_b} - set(shared))
    size = min(a.rows_at_a_time(), b.rows_at_a_time())
    # One side may end first: what is left of the other is counted by rows_a and rows_b.
    for rows_a, rows_b in zip(a.read(size), b.read(size), strict=False):
        common = min(rows_a.num_rows, rows_b.num_rows)
        _compare(comparison, rows_a.slice(0, common), rows_b.slice(0, common), shared)
    return comparison


def _compare(comparison: Comparison, a: pa.Table, b: pa.Table, columns: Sequence[str]) -> None:
    start, num_rows = comparison.rows_compared, a.num_rows
    comparison.rows_compared += num_rows
    differing: set[int] = set()
    for name in columns:
        left, right = a.column(name), b.column(name)
        if left.equals(right):
            continue
        rows = [row for row in range(num_rows) if not equal_cells(left[row], right[row])]
        comparison.columns_differing[name] += len(rows)
        differing.update(rows)
    comparison.columns_differing = +comparison.columns_differing
    comparison.rows_differing += len(differing)
    for row in sorted(differing):
        upto: int | None = None
        if "token_ids" in columns:
            ids = a["token_ids"][row], b["token_ids"][row]
            upto = _compare_tokens(comparison, start + row, *ids)
        for name in ("logprobs", *SUMS):
            if name in columns:
                _compare_logprobs(comparison, start + row, a[name][row], b[name][row], upto)


def _compare_tokens(comparison: Comparison, row_id: int, a: pa.Scalar, b: pa.Scalar) -> int:
    """Notes where the tokens part, and returns how many are the same."""
    left, right = a.as_py() or [], b.as_py() or []
    common = min(len(left), len(right))
    place = next((i for i in range(common) if left[i] != right[i]), common)
    if place < max(len(left), len(right)):
        first, second = ((ids[place] if place < len(ids) else None) for ids in (left, right))
        comparison.tokens_differing.append(RowDifference(row_id, place, first, second))
    return place


def _compare_logprobs(
    comparison: Comparison, row_id: int, a: pa.Scalar, b: pa.Scalar, upto: int | None
) -> None:
    left, right = (np.atleast_1d(np.asarray(cell.as_py(), np.float64)) for cell in (a, b))
    if not (a.is_valid and b.is_valid) or len(left[:upto]) != len(right[:upto]):
        return  # An error, or other choices: that the row differs is said.
    left, right = left[:upto], right[:upto]
    greatest = greatest_difference(left, right)
    if greatest > comparison.logprob_difference:
        comparison.logprob_difference, comparison.logprob_row = greatest, row_id


def same_parts(a: Side, b: Side) -> bool:
    """True if both have the same parts, byte for byte."""
    if [name_of(path) for path in a.paths] != [name_of(path) for path in b.paths]:
        return False
    return all(same_bytes(*pair) for pair in zip(a.paths, b.paths, strict=True))
