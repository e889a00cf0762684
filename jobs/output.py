"""What may be begun in an output folder: refused, completed, mended, or deleted first."""

import os
from collections.abc import Sequence
from typing import Literal

from jobs.claim import LOCK, OWNER, refuse_owned
from jobs.errors import RefusedError, SettingError
from jobs.folder import (
    DRAFT,
    JOB,
    MANIFEST,
    PART,
    PLAN,
    RECORD,
    RECORDS,
    SUCCESS,
    explained,
    readable,
    sweep_drafts,
)
from jobs.storage import Storage, storage_of

Start = Literal["new", "resume", "retry_failed", "overwrite"]
"""What is to become of an output that is there: refused, completed, mended, or deleted."""


def check_output(folder: str, start: Start, *, is_owned: bool = False) -> None:
    """Looks at what is in the output folder and leaves it. is_owned: this run has claimed it.

    Raises RefusedError if it holds what must not be touched, or another run has it; SettingError if
    it cannot be a folder; OutputError if it must not be written, or cannot be reached.
    """
    if not folder:
        raise SettingError("the output folder has no name. Name one.")
    storage_of(folder).check()
    if not is_owned:
        refuse_owned(folder)
    _check_contents(folder, start, _contents(folder))


def _check_contents(folder: str, start: Start, names: Sequence[str]) -> None:
    if start == "retry_failed" and JOB not in names:
        raise RefusedError(f"{folder}: holds no job whose rows could be tried again.")
    if not names:
        return
    if start == "new":
        raise RefusedError(
            f"{folder}: the folder is not empty; it has {', '.join(names[:3])}"
            f"{' and more' if len(names) > 3 else ''}. Choose a new folder, or pass --resume to "
            "complete it or --overwrite to delete it."
        )
    strangers = [name for name in names if not _is_ours(name)]
    if JOB not in names:  # Parts may be called like ours and be somebody else's.
        strangers = strangers or [name for name in names if name != PLAN]
    if strangers and start == "overwrite":
        raise RefusedError(
            f"{folder}: --overwrite deletes only what a job wrote, and {strangers[0]} is not from "
            "a job. Choose a new folder."
        )
    if strangers and JOB not in names:
        raise RefusedError(
            f"{folder}: holds {strangers[0]}, and no {JOB} that says which job wrote it. Choose a "
            "new folder."
        )


def _contents(folder: str) -> list[str]:
    """Names in the folder, without what a run leaves that has written nothing yet."""
    storage = storage_of(folder)
    with readable(folder):
        names = sorted(set(storage.names() if storage.exists() else ()) - {OWNER, LOCK})
        inside = sorted(storage.names(RECORDS)) if RECORDS in names else []
    names += [os.path.join(RECORDS, name) for name in inside if not RECORD.fullmatch(name)]
    return [name for name in names if not DRAFT.fullmatch(os.path.basename(name))]


def _is_ours(name: str) -> bool:
    return name in (JOB, PLAN, MANIFEST, SUCCESS, RECORDS) or bool(PART.fullmatch(name))


def clear_output(folder: str) -> None:
    """Deletes what an earlier job wrote. Should it be broken off, the rest still is a job's."""
    names, storage = _contents(folder), storage_of(folder)
    _check_contents(folder, "overwrite", names)
    with explained(folder):
        for name in sorted(names, key=_order_of_deletion):
            if name == RECORDS:
                _clear_records(storage)
            else:
                storage.delete(name)
    sweep_drafts(folder)


def _order_of_deletion(name: str) -> tuple[bool, int]:
    """Should it be broken off, the rest is not taken for whole, and still is known as a job's."""
    return name != SUCCESS, (PLAN, JOB).index(name) + 1 if name in (PLAN, JOB) else 0


def _clear_records(storage: Storage) -> None:
    for name in storage.names(RECORDS):
        if RECORD.fullmatch(name) or DRAFT.fullmatch(name):
            storage.delete(f"{RECORDS}/{name}")
    storage.delete_folder(RECORDS)
