"""Reading any stretch of the input's rows."""

import os
from collections.abc import Iterator, Sequence
from itertools import accumulate

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import InputError
from jobs.files import InputFile, RowSource

Rows = pa.Table
"Some rows of the input, the columns that a job reads."

_ROWS_PER_READ = 1024
"Small enough that a row of long text does not fill memory, large enough to be fast."


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
        # One dictionary a column: an Arrow file cannot change it on the way.
        return pa.concat_tables(tables).unify_dictionaries()

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
    columns = []
    for field in schema:
        column = table.column(field.name) if field.name in present else None
        if column is None:
            columns.append(pa.nulls(table.num_rows, field.type))
        else:
            columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.Table.from_arrays(columns, schema=schema)
