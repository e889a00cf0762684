"""Reading parts of either format: whole, some columns, a stretch at a time, or the footer alone."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import OutputError
from jobs.storage import name_of, storage_of_file

_UNREADABLE = (OSError, ValueError, pa.ArrowException)
"What a damaged file may raise: a ValueError where text in it is none."


def is_bulky(field: pa.Field) -> bool:
    """True for a field whose values are too big to hold many rows of at once: logits."""
    return field.metadata is not None and field.metadata.get(b"storage") == b"plain"


def read_part(path: str, columns: list[str] | None = None) -> pa.Table:
    """Reads a part of either format, all columns or some."""
    with _opened(path) as file:
        if not _is_arrow(path):
            return pq.ParquetFile(file).read(columns)
        table = _open_arrow(file, columns).read_all()
        return table if columns is None else table.select(columns)


def part_schema(path: str) -> pa.Schema:
    """The schema of a part of either format."""
    with _opened(path) as file:
        return _open_arrow(file).schema if _is_arrow(path) else pq.read_schema(file)


def hash_part(path: str) -> str:
    """SHA-256 of a part's bytes. Raises OSError if it cannot be read."""
    storage, name = storage_of_file(path)
    with storage.open_stream(name) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def part_size(path: str) -> int:
    """Bytes of a part. Raises OSError if it is not there."""
    storage, name = storage_of_file(path)
    return storage.size(name)


def same_bytes(a: str, b: str) -> bool:
    """True if two parts are the same, byte for byte."""
    if part_size(a) != part_size(b):
        return False
    (storage_a, name_a), (storage_b, name_b) = storage_of_file(a), storage_of_file(b)
    with storage_a.open_stream(name_a) as left, storage_b.open_stream(name_b) as right:
        while piece := left.read(2**20):
            if piece != right.read(2**20):
                return False
    return True


def same_schema(a: pa.Schema, b: pa.Schema) -> bool:
    """Equal in all but the names that formats give to what is inside of maps."""
    plain_a, plain_b = (pa.ipc.read_schema(schema.serialize()) for schema in (a, b))
    return bool(plain_a.equals(plain_b, check_metadata=True))


def part_num_rows(path: str) -> int:
    """How many rows a part of either format has, by its footer."""
    with _opened(path) as file:
        if not _is_arrow(path):
            return int(pq.read_metadata(file).num_rows)
        batches = _open_arrow(file, _open_arrow(file).schema.names[:1])
        places = range(batches.num_record_batches)
        return sum(batches.get_batch(place).num_rows for place in places)


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
    storage, name = storage_of_file(path)
    with storage.open_file(name) as file:  # What a reading raises is the caller's to explain.
        if _is_arrow(path):
            batches = _open_arrow(file)
            for index in range(batches.num_record_batches):
                yield pa.Table.from_batches([batches.get_batch(index)])
        else:
            groups = pq.ParquetFile(file)
            for group in range(groups.num_row_groups):
                yield groups.read_row_group(group)


def _is_arrow(path: str) -> bool:
    return name_of(path).endswith(".arrow")


@contextmanager
def _opened(path: str) -> Iterator[pa.NativeFile]:
    storage, name = storage_of_file(path)
    try:
        with storage.open_file(name) as file:
            yield file
    except _UNREADABLE as error:
        raise OutputError(f"{path}: cannot be read: {error}") from error


def _open_arrow(
    file: pa.NativeFile, columns: list[str] | None = None
) -> "pa.ipc.RecordBatchFileReader":
    """Opens an Arrow file. columns: all that is to be read of it."""
    batches = pa.ipc.open_file(file)
    if columns is None:
        return batches
    wanted = [index for index, name in enumerate(batches.schema.names) if name in columns]
    return pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=wanted))
