"""Reading parts of either format: whole, some columns, a stretch at a time, or the footer alone."""

import hashlib
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import OutputError

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


def hash_part(path: str) -> str:
    """SHA-256 of a part's bytes. Raises OSError if it cannot be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
