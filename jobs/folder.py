"""The output folder and its files.

out/
  part-00034.parquet     rows of shard 34
  _records/              a record of each part: counts and checksum
  _job.json _plan.json   what was asked, and what it was settled to be
  _owner.json            the run that has the folder, while it has it
  _manifest.json         what came of it
  _SUCCESS               last of all
"""

import errno
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pyarrow as pa

from jobs.errors import OutputError
from jobs.storage import join, name_of, storage_of
from jobs.store import store_remedy

JOB, PLAN, MANIFEST, SUCCESS = "_job.json", "_plan.json", "_manifest.json", "_SUCCESS"
RECORDS = "_records"
PART = re.compile(r"part-\d{5,}\.(parquet|arrow)")
RECORD = re.compile(r"part-\d{5,}\.json")
DRAFT = re.compile(r"\.(part-\d{5,}(\.json)?|_\w+(\.json)?)\.\w+\.draft")


def mark_unfinished(folder: str) -> None:
    """Takes back that the folder is whole, since parts are about to be added or mended."""
    with explained(folder):
        for name in (SUCCESS, MANIFEST):
            storage_of(folder).delete(name)
    sweep_drafts(folder)


def write_json(
    folder: str, name: str, content: Mapping[str, object], *, is_durable: bool = True
) -> None:
    """Writes one of the folder's JSON files, whole or not at all.

    is_durable: waits until it would survive a loss of power.
    """
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    with explained(folder):
        storage_of(folder).write(name, text.encode(), is_durable=is_durable)


def sweep_drafts(folder: str) -> None:
    """Deletes what workers that died have left behind."""
    storage = storage_of(folder)
    with explained(folder):
        for place in ("", RECORDS):
            for name in storage.names(place) if storage.exists(place) else ():
                if DRAFT.fullmatch(name):
                    storage.delete(f"{place}/{name}" if place else name)


def check_parts(folder: str, names: Sequence[str]) -> None:
    """Raises OutputError unless all parts that workers reported are in the folder."""
    missing = sorted(set(names) - {name_of(path) for path in list_parts(folder)})
    if missing:
        raise OutputError(
            f"{folder}: {missing[0]} was written by a worker and is not here. Use storage that "
            "every node sees under the same path."
        )


def mark_success(folder: str) -> None:
    """Says that every row is accounted for. The last thing written."""
    with explained(folder):
        storage_of(folder).sync()
        storage_of(folder).write(SUCCESS, b"", is_durable=False)


def is_finished(folder: str) -> bool:
    """True if every row of the folder's job is accounted for."""
    return _has(folder, SUCCESS, MANIFEST)


def has_job(folder: str) -> bool:
    """True if the folder says which job it is for, and has not begun to be cleared."""
    return _has(folder, JOB, PLAN)


def _has(folder: str, *names: str) -> bool:
    with readable(folder):
        return all(storage_of(folder).exists(name) for name in names)


def read_json(folder: str, name: str) -> dict[str, object]:
    """Reads one of the folder's JSON files. Raises OutputError if it is not there."""
    storage = storage_of(folder)
    try:
        content: dict[str, object] = json.loads(storage.read(name).decode())
    except (OSError, ValueError) as error:
        raise OutputError(f"{folder}: not the output of a job: {error}") from error
    return content


def list_parts(folder: str) -> list[str]:
    """Paths of the finished parts, in row order."""
    with readable(folder):
        parts = [name for name in storage_of(folder).names() if PART.fullmatch(name)]
    # Numbers are compared as numbers: part-100000 comes after part-99999.
    return [join(folder, name) for name in sorted(parts, key=lambda name: (len(name), name))]


def part_name(index: int, file_format: str) -> str:
    """Name of the part that holds the shard of the same number."""
    return f"part-{index:05d}.{file_format}"


_REMEDIES = {
    errno.ENOSPC: "Free some space",
    errno.EDQUOT: "Free some space",
    errno.EACCES: "Give permission back",
    errno.EPERM: "Give permission back",
    errno.EROFS: "Make it writable",
    errno.ENOENT: "Put the folder back, or start afresh",
}


@contextmanager
def readable(folder: str) -> Iterator[None]:
    """Says which folder or file could not be read."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{folder}: cannot be read: {error}") from error


@contextmanager
def explained(folder: str) -> Iterator[None]:
    """Says which folder could not be written, and what may help."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        number = getattr(error, "errno", None) or 0
        remedy = store_remedy(error) or _REMEDIES.get(number, "Mend it")
        raise OutputError(
            f"{folder}: cannot be written: {error}. {remedy}, then run again with --resume: what "
            "is finished is kept."
        ) from error
