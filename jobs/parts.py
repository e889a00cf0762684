"""Reading parts of either format: whole, some columns, a stretch at a time, or the footer alone."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import OutputError

_LISTS = (pa.ListScalar, pa.LargeListScalar, pa.FixedSizeListScalar)
_UNREADABLE = (OSError, ValueError, pa.ArrowException)
"What a damaged file may raise: a ValueError where text in it is none."


def is_bulky(field: pa.Field) -> bool:
    """True for a field whose values are too big to hold many rows of at once: logits."""
    return field.metadata is not None and field.metadata.get(b"storage") == b"plain"


def read_part(path: str, columns: list[str] | None = None) -> pa.Table:
    """Reads a part of either format, all columns or some."""
    try:
        if path.endswith(".arrow"):
            with pa.memory_map(path) as file:
                table = pa.ipc.open_file(file).read_all()
            return table if columns is None else table.select(columns)
        return pq.ParquetFile(path).read(columns)
    except _UNREADABLE as error:
        raise OutputError(f"{path}: cannot be read: {error}") from error


def part_schema(path: str) -> pa.Schema:
    """The schema of a part of either format."""
    try:
        if path.endswith(".arrow"):
            with pa.memory_map(path) as file:
                return pa.ipc.open_file(file).schema
        return pq.read_schema(path)
    except _UNREADABLE as error:
        raise OutputError(f"{path}: cannot be read: {error}") from error


def same_schema(a: pa.Schema, b: pa.Schema) -> bool:
    """Equal in all but the names that formats give to what is inside of maps."""
    plain_a, plain_b = (pa.ipc.read_schema(schema.serialize()) for schema in (a, b))
    return bool(plain_a.equals(plain_b, check_metadata=True))


def part_num_rows(path: str) -> int:
    """How many rows a part of either format has, by its footer."""
    try:
        if path.endswith(".arrow"):
            with pa.memory_map(path) as file:
                batches = pa.ipc.open_file(file)
                return sum(
                    batches.get_batch(index).num_rows for index in range(batches.num_record_batches)
                )
        return int(pq.read_metadata(path).num_rows)
    except _UNREADABLE as error:
        raise OutputError(f"{path}: cannot be read: {error}") from error


class PartReader:
    """Reads a part of either format from front to back, a stretch of rows at a time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pieces = read_pieces(path)
        self._rest: pa.Table | None = None

    def read(self, num_rows: int) -> pa.Table:
        """The next rows. Raises OutputError if there are not so many, or they cannot be read."""
        tables = [] if self._rest is None else [self._rest]
        held = sum(table.num_rows for table in tables)
        try:
            while held < num_rows:
                tables.append(next(self._pieces))
                held += tables[-1].num_rows
        except _UNREADABLE as error:
            raise OutputError(f"{self._path}: cannot be read: {error}") from error
        except StopIteration as error:
            raise OutputError(f"{self._path}: has fewer rows than were planned.") from error
        table = pa.concat_tables(tables) if tables else part_schema(self._path).empty_table()
        self._rest = table.slice(num_rows)
        return table.slice(0, num_rows)


def read_pieces(path: str) -> Iterator[pa.Table]:
    """A part's rows as they were written: no piece is larger than a worker's memory allows."""
    if path.endswith(".arrow"):
        with pa.memory_map(path) as file:
            batches = pa.ipc.open_file(file)
            for index in range(batches.num_record_batches):
                yield pa.Table.from_batches([batches.get_batch(index)])
    else:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                yield file.read_row_group(group)


def flat_numbers(cell: pa.Scalar) -> npt.NDArray[np.generic] | None:
    """All numbers of a cell that is a list of them, however deep; None if it is something else.

    A list with a null in it is something else: numpy has no such number.
    """
    if not cell.is_valid or not isinstance(cell, _LISTS):
        return None
    values = cell.values
    while pa.types.is_fixed_size_list(values.type) and not values.null_count:
        values = values.flatten()
    is_number = pa.types.is_floating(values.type) or pa.types.is_integer(values.type)
    if not is_number or values.null_count:
        return None
    numbers: npt.NDArray[np.generic] = values.to_numpy(zero_copy_only=False)
    return numbers
