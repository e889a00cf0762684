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
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from jobs.errors import OutputError

_TOKEN = secrets.token_hex(4)
"Tells this process from those of the same number on other machines."

JOB, PLAN, MANIFEST, SUCCESS = "_job.json", "_plan.json", "_manifest.json", "_SUCCESS"
RECORDS = "_records"
PART = re.compile(r"part-\d{5,}\.(parquet|arrow)")
RECORD = re.compile(r"part-\d{5,}\.json")
DRAFT = re.compile(r"\.(part-\d{5,}(\.json)?|_\w+\.json)\.\w+\.draft")


def mark_unfinished(folder: str) -> None:
    """Takes back that the folder is whole, since parts are about to be added or mended."""
    with explained(folder):
        for name in (SUCCESS, MANIFEST):
            Path(folder, name).unlink(missing_ok=True)
    sweep_drafts(folder)


def write_json(
    folder: str, name: str, content: Mapping[str, object], *, is_durable: bool = True
) -> None:
    """Writes one of the folder's JSON files, whole or not at all.

    is_durable: waits until it would survive a loss of power.
    """
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    draft = draft_path(folder, name)
    with explained(folder):
        os.makedirs(os.path.dirname(draft), exist_ok=True)
        try:
            with open(draft, "w", encoding="utf-8") as file:
                file.write(text)
                if is_durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(draft, os.path.join(folder, name))
        finally:
            Path(draft).unlink(missing_ok=True)


def _sync_folder(folder: str) -> None:
    """Returns when new names in the folder would survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # Some network storage keeps names by itself.
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_drafts(folder: str) -> None:
    """Deletes what workers that died have left behind."""
    with explained(folder):
        for place in (folder, os.path.join(folder, RECORDS)):
            for name in os.listdir(place) if os.path.isdir(place) else ():
                if DRAFT.fullmatch(name):
                    Path(place, name).unlink(missing_ok=True)


def check_parts(folder: str, names: Sequence[str]) -> None:
    """Raises OutputError unless all parts that workers reported are in the folder."""
    missing = sorted(set(names) - {os.path.basename(path) for path in list_parts(folder)})
    if missing:
        raise OutputError(
            f"{folder}: {missing[0]} was written by a worker and is not here. Use storage that "
            "every node sees under the same path."
        )


def mark_success(folder: str) -> None:
    """Says that every row is accounted for. The last thing written."""
    with explained(folder):
        _sync_folder(folder)
        Path(folder, SUCCESS).touch()


def is_finished(folder: str) -> bool:
    """True if every row of the folder's job is accounted for."""
    return all(os.path.exists(os.path.join(folder, name)) for name in (SUCCESS, MANIFEST))


def has_job(folder: str) -> bool:
    """True if the folder says which job it is for, and has not begun to be cleared."""
    return all(os.path.exists(os.path.join(folder, name)) for name in (JOB, PLAN))


def read_json(folder: str, name: str) -> dict[str, object]:
    """Reads one of the folder's JSON files. Raises OutputError if it is not there."""
    try:
        content: dict[str, object] = json.loads(Path(folder, name).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise OutputError(f"{folder}: not the output of a job: {error}") from error
    return content


def list_parts(folder: str) -> list[str]:
    """Paths of the finished parts, in row order."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be read: {error}") from error
    parts = [name for name in names if PART.fullmatch(name)]
    # Numbers are compared as numbers: part-100000 comes after part-99999.
    return [
        os.path.join(folder, name) for name in sorted(parts, key=lambda name: (len(name), name))
    ]


def part_name(index: int, file_format: str) -> str:
    """Name of the part that holds the shard of the same number."""
    return f"part-{index:05d}.{file_format}"


def draft_path(folder: str, name: str) -> str:
    """Where a file is written until it is whole: hidden from readers, and swept by a new claim."""
    parent, name = os.path.split(name)
    return os.path.join(folder, parent, f".{name}.{os.getpid()}_{_TOKEN}.draft")


_REMEDIES = {
    errno.ENOSPC: "Free some space",
    errno.EDQUOT: "Free some space",
    errno.EACCES: "Give permission back",
    errno.EPERM: "Give permission back",
    errno.EROFS: "Make it writable",
    errno.ENOENT: "Put the folder back, or start afresh",
}


@contextmanager
def explained(folder: str) -> Iterator[None]:
    """Says which folder could not be written, and what may help."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        remedy = _REMEDIES.get(getattr(error, "errno", None) or 0, "Mend it")
        raise OutputError(
            f"{folder}: cannot be written: {error}. {remedy}, then run again with --resume: what "
            "is finished is kept."
        ) from error
