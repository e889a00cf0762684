"""Input files: which they are, how many rows they hold, and the one schema that all of them fit.

Only footers are read.
"""

import glob
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import InputError

_SUFFIXES = (".parquet", ".pq")


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
    lacking: dict[str, str]
    "By column that is not in every file, the first file without it."

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
    schemas = [(file.path, schema) for file, schema in footers]
    unified = _unify(schemas)
    lacking = {
        name: next(path for path, schema in schemas if name not in schema.names)
        for name in unified.names
        if any(name not in schema.names for _, schema in schemas)
    }
    return RowSource(tuple(file for file, _ in footers), unified, lacking)


def fixed_folder(pattern: str) -> str:
    """The folder that a pattern looks into: its path up to the first sign of a pattern."""
    parts = Path(pattern).parts
    fixed = takewhile(lambda part: not glob.has_magic(part), parts[:-1])
    return str(Path(*fixed))


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
    folder = fixed_folder(pattern)
    found = glob.glob(pattern, recursive=True)
    visible = [path for path in found if not _is_hidden(os.path.relpath(path, folder))]
    paths = [path for path in visible if os.path.isfile(path)]
    if not paths:
        remedy = " Only folders do: give the folder above, or a pattern for files."
        raise InputError(f"{pattern}: no file matches this pattern.{remedy * bool(visible)}")
    return _in_name_order(paths)


def _find_in_folder(folder: str) -> list[str]:
    paths, entered = [], set()
    for parent, subfolders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        place = os.path.realpath(parent)
        if place in entered:  # A link that leads back.
            subfolders[:] = []
            continue
        entered.add(place)
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
    return _in_name_order(paths)


def _in_name_order(paths: list[str]) -> list[str]:
    return sorted(paths, key=lambda path: Path(path).parts)


def _refuse(error: OSError) -> None:
    raise InputError(f"{error.filename}: cannot be read: {error.strerror}.") from error


def _is_hidden(path: str) -> bool:
    return any(part.startswith(("_", ".")) for part in Path(path).parts)


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
    """One schema for all files: a type of all nulls gives way, any other difference is refused."""
    fields: dict[str, tuple[str, pa.Field]] = {}
    for path, schema in schemas:
        if len(set(schema.names)) < len(schema.names):
            raise InputError(f"{path}: two columns have the same name. It has: {schema.names}.")
        for field in schema:
            first_path, known = fields.setdefault(field.name, (path, field))
            if pa.types.is_null(known.type):
                fields[field.name] = path, field
            elif field.type != known.type and not pa.types.is_null(field.type):
                raise InputError(
                    f"{path}: column {field.name!r} is {field.type}, and {known.type} in "
                    f"{first_path}. Convert one of them."
                )
    nullable = {
        name
        for name in fields
        for _, schema in schemas
        if name not in schema.names or schema.field(name).nullable
    }
    return pa.schema([field.with_nullable(name in nullable) for name, (_, field) in fields.items()])
