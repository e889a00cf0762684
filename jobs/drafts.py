"""Drafts: parts that nobody sees until they are whole."""

import hashlib
from contextlib import suppress
from types import TracebackType
from typing import BinaryIO, Self

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.folder import explained, part_name
from jobs.parts import is_bulky
from jobs.plan import Shard
from jobs.report import Part
from jobs.storage import storage_of

_ROW_GROUP_BYTES = 128 * 2**20
"Most bytes of a row group, so that a reader with little memory can go through a part."


class PartWriter:
    """Writes one part: append tables, finish, commit. Left without commit, it leaves nothing."""

    def __init__(self, folder: str, shard: Shard, schema: pa.Schema, file_format: str) -> None:
        self.name = part_name(shard.index, file_format)
        self._folder = folder
        self._num_rows = 0
        self._is_whole = False
        with explained(folder):
            self._draft = storage_of(folder).draft(self.name)
            self._file = _HashingFile(self._draft.file)
            self._writer = _open_writer(self._file, schema, file_format)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_whole:
            return
        with suppress(OSError, pa.ArrowException):
            self._writer.close()
        with suppress(OSError):
            self._file.close()
        self._draft.discard()

    def append(self, table: pa.Table) -> None:
        """Adds rows, as row groups that a reader with little memory can take one at a time."""
        if not table.num_rows:
            return
        with explained(self._draft.place):
            for piece in _pieces(table):
                self._writer.write_table(piece)
        self._num_rows += table.num_rows

    def finish(self) -> Part:
        """Brings the draft to the disk, whole and still hidden, and says what it is."""
        with explained(self._draft.place):
            self._writer.close()
            size = self._draft.seal()
        return Part(self.name, self._num_rows, size, self._file.sha256)

    def commit(self) -> None:
        """Makes the part visible under its own name."""
        with explained(self._folder):
            self._draft.publish()
        self._is_whole = True


def _pieces(table: pa.Table) -> list[pa.Table]:
    """Cuts a table into row groups of few enough bytes; a row alone may be larger."""
    if table.nbytes <= _ROW_GROUP_BYTES:
        return [table]
    starts, held = [0], 0
    for row in range(table.num_rows):
        size = table.slice(row, 1).nbytes
        if held and held + size > _ROW_GROUP_BYTES:
            starts.append(row)
            held = 0
        held += size
    return [
        table.slice(start, stop - start)
        for start, stop in zip(starts, [*starts[1:], table.num_rows], strict=True)
    ]


def _open_writer(
    file: "_HashingFile", schema: pa.Schema, file_format: str
) -> "pq.ParquetWriter | pa.ipc.RecordBatchFileWriter":
    """Writer settings are fixed: the same rows must be the same bytes, on any machine."""
    if file_format == "arrow":
        return pa.ipc.new_file(file, schema)
    # Logits are noise to a compressor: it would cost time and save nothing.
    bulky = {f"{field.name}.list.element.list.element" for field in schema if is_bulky(field)}
    paths = _leaf_paths(schema)
    small = [path for path in paths if path not in bulky]
    return pq.ParquetWriter(
        file,
        schema,
        version="2.6",
        compression={path: "none" if path in bulky else "zstd" for path in paths},
        compression_level=dict.fromkeys(small, 3),
        use_dictionary=small,
        write_statistics=small,
    )


def _leaf_paths(schema: pa.Schema) -> list[str]:
    """Parquet's own paths of the columns that hold values, by writing an empty file."""
    sink = pa.BufferOutputStream()
    pq.ParquetWriter(sink, schema).close()
    leaves = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    return [leaves.column(index).path for index in range(len(leaves))]


class _HashingFile:
    """A file that is written from front to back, and knows the hash of what went in."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Of all that was written so far, in hexadecimal."""
        return self._hash.hexdigest()

    def write(self, content: bytes) -> int:
        self._hash.update(content)
        return self._file.write(content)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self.closed = True
        self._file.close()
