"""The output folder: claimed for one job, and marked when it is whole.

out/
  part-00034.parquet     rows of shard 34
  _job.json _plan.json   what was asked, and what it was settled to be
  _manifest.json         what came of it
  _SUCCESS               last of all
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from jobs.errors import OutputError, RefusedError, SettingError

JOB, PLAN, MANIFEST, SUCCESS = "_job.json", "_plan.json", "_manifest.json", "_SUCCESS"
_PART = re.compile(r"part-\d{5,}\.(parquet|arrow)")
_DRAFT = re.compile(r"\.(part-\d{5,}|_\w+\.json)\.\d+\.draft")


def check_output(folder: str, *, overwrite: bool) -> None:
    """Looks at the output folder without touching it.

    Raises RefusedError if it holds anything, and overwrite was not asked for or it is not a job's
    folder; SettingError if it cannot be a folder; OutputError if it must not be written.
    """
    if not folder:
        raise SettingError("the output folder has no name. Name one.")
    if "://" in folder:
        raise SettingError(
            f"{folder}: only local folders can be written. Give a path without a scheme."
        )
    path = Path(folder)
    if not path.exists():
        parent = next(parent for parent in path.absolute().parents if parent.exists())
        if not parent.is_dir():
            raise SettingError(f"{folder}: {parent} is a file. Choose another folder.")
        _check_writable(parent)
        return
    if not path.is_dir():
        raise SettingError(f"{folder}: is a file. Choose a folder.")
    _check_writable(path)
    names = sorted(os.listdir(path))
    if names and not overwrite:
        raise RefusedError(
            f"{folder}: the folder is not empty; it has {', '.join(names[:3])}"
            f"{' and more' if len(names) > 3 else ''}. Choose a new folder, or pass --overwrite."
        )
    strangers = [name for name in names if not _is_ours(name)]
    if names and JOB not in names:  # Parts may be called like ours and be somebody else's.
        strangers = strangers or names
    if strangers:
        raise RefusedError(
            f"{folder}: --overwrite deletes only what a job wrote, and {strangers[0]} is not from "
            "a job. Choose a new folder."
        )


def _check_writable(path: Path) -> None:
    if not os.access(path, os.W_OK | os.X_OK):
        raise OutputError(f"{path}: no permission to write here. Choose another folder.")


def _is_ours(name: str) -> bool:
    if name in (JOB, PLAN, MANIFEST, SUCCESS):
        return True
    return bool(_PART.fullmatch(name) or _DRAFT.fullmatch(name))


def claim_output(folder: str, *, overwrite: bool) -> None:
    """Makes the folder, empties it of an earlier job's files if asked, and takes it for this job.

    Raises RefusedError if another run takes it at the same moment.
    """
    check_output(folder, overwrite=overwrite)
    try:
        os.makedirs(folder, exist_ok=True)
        # Should this be broken off, the rest is not taken for whole, and still is a job's.
        for name in sorted(os.listdir(folder), key=lambda name: (name != SUCCESS, name == JOB)):
            os.unlink(os.path.join(folder, name))
        os.close(os.open(os.path.join(folder, JOB), os.O_CREAT | os.O_EXCL))
    except FileExistsError as error:
        raise RefusedError(f"{folder}: another run has just taken it. Choose another.") from error
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made ready: {error}") from error


def write_json(folder: str, name: str, content: Mapping[str, object]) -> None:
    """Writes one of the folder's JSON files, whole or not at all."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    draft = draft_path(folder, name)
    with explained(folder):
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, os.path.join(folder, name))


def sweep_drafts(folder: str) -> None:
    """Deletes what workers that died have left behind."""
    with explained(folder):
        for name in os.listdir(folder):
            if _DRAFT.fullmatch(name):
                os.unlink(os.path.join(folder, name))


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
        Path(folder, SUCCESS).touch()


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
    parts = [name for name in names if _PART.fullmatch(name)]
    # Numbers are compared as numbers: part-100000 comes after part-99999.
    return [
        os.path.join(folder, name) for name in sorted(parts, key=lambda name: (len(name), name))
    ]


def part_name(index: int, file_format: str) -> str:
    """Name of the part that holds the shard of the same number."""
    return f"part-{index:05d}.{file_format}"


def draft_path(folder: str, name: str) -> str:
    """Where a file is written until it is whole: hidden from readers, and swept by a new claim."""
    return os.path.join(folder, f".{name}.{os.getpid()}.draft")


@contextmanager
def explained(folder: str) -> Iterator[None]:
    """Says which folder could not be written."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise OutputError(f"{folder}: cannot be written: {error}") from error
