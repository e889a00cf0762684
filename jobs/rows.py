"""Input files: which they are, how many rows they hold, and reading any stretch of their rows.

Finding files, counting rows and checking columns look at footers only.
"""

import glob
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import InputError

_SUFFIXES = (".parquet", ".pq")
_ROWS_PER_READ = 1024
"Small enough that a row of long text does not fill memory, large enough to be fast."


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of rows, and what tells it from a changed one."""

    path: str
    num_rows: int
    num_row_groups: int
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class RowSource:
    """The input: its files in name order, and the one schema that all of them fit."""

    files: tuple[InputFile, ...]
    schema: pa.Schema

    @property
    def num_rows(self) -> int:
        """Rows in all files."""
        return sum(file.num_rows for file in self.files)


def scan_input(pattern: str) -> RowSource:
    """Finds the files that pattern names and reads their footers.

    Raises InputError if nothing is found, a file is no Parquet file, or two files disagree.
    """
    paths = _find_files(pattern)
    with ThreadPoolExecutor(max_workers=16) as readers:
        footers = list(readers.map(_read_footer, paths))
    files = tuple(file for file, _ in footers)
    return RowSource(files, _unify([(file.path, schema) for file, schema in footers]))


def _find_files(pattern: str) -> list[str]:
    if "://" in pattern:
        raise InputError(f"{pattern}: only local paths can be read. Give a path without a scheme.")
    # A path that exists is meant literally, whatever signs of a pattern its name contains.
    if os.path.isdir(pattern):
        return _find_in_folder(pattern)
    if os.path.exists(pattern):
        return [pattern]
    if not glob.has_magic(pattern):
        raise InputError(f"{pattern}: no such file or folder.")
    paths = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
    visible = sorted(path for path in paths if not _is_hidden(os.path.basename(path)))
    if not visible:
        raise InputError(f"{pattern}: no file matches this pattern.")
    return visible


def _find_in_folder(folder: str) -> list[str]:
    paths = []
    for parent, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not _is_hidden(name)]
        for name in subfolders:
            if "=" in name:
                raise InputError(
                    f"{os.path.join(parent, name)}: folders that hold a column's value in their "
                    "name cannot be read yet. Give the files themselves, or a glob."
                )
        paths += [
            os.path.join(parent, name)
            for name in names
            if name.endswith(_SUFFIXES) and not _is_hidden(name)
        ]
    if not paths:
        raise InputError(f"{folder}: the folder holds no file that ends in .parquet or .pq.")
    return sorted(paths, key=lambda path: Path(path).relative_to(folder).parts)


def _is_hidden(name: str) -> bool:
    return name.startswith(("_", "."))


def _read_footer(path: str) -> tuple[InputFile, pa.Schema]:
    try:
        stat = os.stat(path)
        with pq.ParquetFile(path) as file:
            metadata = file.metadata
            schema = file.schema_arrow.remove_metadata()
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read as a Parquet file: {error}") from error
    return (
        InputFile(path, metadata.num_rows, metadata.num_row_groups, stat.st_size, stat.st_mtime_ns),
        schema,
    )


def _unify(schemas: Sequence[tuple[str, pa.Schema]]) -> pa.Schema:
    first_path, unified = schemas[0]
    for path, schema in schemas[1:]:
        if schema.equals(unified):
            continue
        try:
            unified = pa.unify_schemas([unified, schema])
        except pa.ArrowException as error:
            raise InputError(
                f"{path} and {first_path} hold columns of one name and different types: {error} "
                "Convert one of them."
            ) from error
    if len(set(unified.names)) < len(unified.names):
        raise InputError(f"{first_path}: two columns have the same name: {unified.names}.")
    return unified


class RowReader:
    """Reads stretches of rows. Going forward is cheap: what was decoded is not decoded again."""

    def __init__(self, source: RowSource, columns: Sequence[str]) -> None:
        self._source = source
        self._schema = pa.schema([source.schema.field(name) for name in columns])
        self._file_starts = [0, *accumulate(file.num_rows for file in source.files)]
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._batch: pa.RecordBatch | None = None
        self._batch_start = 0
        self._group_stop = 0
        self._open_path: str | None = None
        self._file: pq.ParquetFile | None = None

    def read(self, start: int, stop: int) -> pa.Table:
        """Rows [start, stop), the columns chosen, with the source's types.

        Raises InputError if a file has changed since it was planned, or cannot be read.
        """
        tables = [self._schema.empty_table()]
        while start < stop:
            batch = self._batch_at(start)
            offset = start - self._batch_start
            piece = batch.slice(offset, stop - start)
            tables.append(_conform(pa.Table.from_batches([piece]), self._schema))
            start += piece.num_rows
        return pa.concat_tables(tables)

    def _batch_at(self, row_id: int) -> pa.RecordBatch:
        if not self._batch_start <= row_id < self._group_stop:
            self._enter_row_group(row_id)
        while self._batch is None or row_id >= self._batch_start + self._batch.num_rows:
            if self._batch is not None:
                self._batch_start += self._batch.num_rows
            try:
                self._batch = next(self._batches)
            except (OSError, pa.ArrowException) as error:
                raise InputError(
                    f"{self._open_path}: row {row_id} cannot be read: {error}"
                ) from error
        return self._batch

    def _enter_row_group(self, row_id: int) -> None:
        file_index = next(
            index for index, stop in enumerate(self._file_starts[1:]) if row_id < stop
        )
        parquet = self._open(self._source.files[file_index])
        group_start = self._file_starts[file_index]
        for group in range(parquet.metadata.num_row_groups):
            group_stop = group_start + parquet.metadata.row_group(group).num_rows
            if row_id < group_stop:
                break
            group_start = group_stop
        self._batches = parquet.iter_batches(
            _ROWS_PER_READ, row_groups=[group], columns=self._schema.names
        )
        self._batch, self._batch_start, self._group_stop = None, group_start, group_stop

    def _open(self, file: InputFile) -> pq.ParquetFile:
        if self._file is None or self._open_path != file.path:
            try:
                stat = os.stat(file.path)
                if (stat.st_size, stat.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
                    raise InputError(
                        f"{file.path}: the file has changed since the job was planned. "
                        "Start the job again, in a new folder."
                    )
                self._file = pq.ParquetFile(file.path)
            except (OSError, pa.ArrowException) as error:
                raise InputError(f"{file.path}: cannot be read: {error}") from error
            self._open_path = file.path
        return self._file


def _conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Gives a file's rows the schema of all files: absent columns are null, types the wider one."""
    present = set(table.column_names)
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in present
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
