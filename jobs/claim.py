"""One owner of an output folder at a time. A claim that has died is told from one that lives.

The owner is named in _owner.json. On the same machine its process either runs or does not. From
another machine only its heartbeat can be heard: it touches the file every few seconds. Who looks at
a claim in order to take it holds a lock meanwhile, so that of many one gets it.
"""

import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from jobs.errors import OutputError, RefusedError
from jobs.lock import locked
from jobs.owner import Owner, start_of, this_place, this_process

OWNER = "_owner.json"
LOCK = ".owner.lock"
SECONDS_BETWEEN_BEATS = 5.0
SECONDS_UNTIL_DEAD = 60.0
"Without a beat for so long, an owner on another machine is taken for dead."
_LOOKS, _SECONDS_BETWEEN_LOOKS = 5, 0.2


@dataclass(frozen=True, slots=True)
class Claim:
    """A folder taken for one run."""

    folder: str
    run_id: str
    dead_owner: str | None
    "Whose claim was taken over; None if the folder was free."

    def check(self) -> None:
        """Raises RefusedError if the folder is no longer this run's."""
        check_owner(self.folder, self.run_id)


@contextmanager
def claim_output(folder: str) -> Iterator[Claim]:
    """Has the folder to itself, making it if need be, and gives it free at the end.

    Raises RefusedError if another run has it; OutputError if it cannot be made.
    """
    me = this_process()
    made = _make_folder(folder)
    lock = os.path.join(folder, LOCK)
    try:
        with locked(lock):
            dead = _remove_dead_owner(folder)
            descriptor = _write_owner(folder, me)
    except OSError as error:
        _remove_folders(made)
        raise OutputError(f"{folder}: cannot be made ready: {error}") from error
    stop = threading.Event()
    heart = threading.Thread(target=_beat, args=(descriptor, stop), daemon=True)
    try:
        heart.start()
        yield Claim(folder, me.run_id, dead)
    finally:
        stop.set()
        heart.join()
        os.close(descriptor)
        with suppress(OSError), locked(lock):
            owner = read_owner(folder)
            if owner is not None and owner.run_id == me.run_id:
                os.unlink(os.path.join(folder, OWNER))
        _remove_folders(made)


def _make_folder(folder: str) -> list[str]:
    """Makes the folder and returns what had to be made, the deepest first."""
    missing, path = [], os.path.abspath(folder)
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made: {error}. Choose another folder.") from error
    return missing


def _remove_folders(folders: Sequence[str]) -> None:
    """A run that has written nothing leaves nothing."""
    with suppress(OSError):
        for folder in folders:
            os.rmdir(folder)


def _remove_dead_owner(folder: str) -> str | None:
    """Removes a dead claim and says whose it was. Raises RefusedError for a living one."""
    if not os.path.lexists(os.path.join(folder, OWNER)):
        return None
    refuse_owned(folder)
    owner = read_owner(folder)
    os.unlink(os.path.join(folder, OWNER))
    return "an unknown run" if owner is None else str(owner)


def _write_owner(folder: str, owner: Owner) -> int:
    """Names the owner, and returns the open file, which the heartbeat touches."""
    path = os.path.join(folder, OWNER)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        os.write(descriptor, json.dumps(asdict(owner)).encode())
    except OSError:
        os.close(descriptor)
        os.unlink(path)
        raise
    return descriptor


def refuse_owned(folder: str) -> None:
    """Raises RefusedError if a living run has the folder."""
    owner = read_owner(folder)
    if not os.path.lexists(os.path.join(folder, OWNER)) or _is_dead(folder, owner):
        return
    by = "a run" if owner is None else str(owner)
    elsewhere = owner is None or owner.place != this_place()
    remedy = f" Should that run be dead, try again in {SECONDS_UNTIL_DEAD:.0f} s." * elsewhere
    raise RefusedError(f"{folder}: in use by {by}. Wait for it, or choose another folder.{remedy}")


def check_owner(folder: str, run_id: str) -> None:
    """Raises RefusedError if the folder is no longer this run's: nothing more may be written."""
    owner = read_owner(folder)
    for _ in range(_LOOKS):
        if owner is None and os.path.exists(folder):  # A network's pause may pass.
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            owner = read_owner(folder)
    if owner is None or owner.run_id != run_id:
        by = "nobody's any more" if owner is None else f"taken over by {owner}"
        raise RefusedError(
            f"{folder}: the folder is {by}. This run ends; what it has finished is kept."
        )


def read_owner(folder: str) -> Owner | None:
    """Who has the folder, dead or alive; None if nobody or if it cannot be read."""
    try:
        return Owner(**json.loads(Path(folder, OWNER).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _beat(descriptor: int, stop: threading.Event) -> None:
    while not stop.wait(SECONDS_BETWEEN_BEATS):
        with suppress(OSError):  # A network's pause. The next beat may come through.
            os.utime(descriptor)


def _is_dead(folder: str, owner: Owner | None) -> bool:
    if owner is not None and owner.place == this_place():
        started = start_of(owner.pid)
        if started != "":
            return started != owner.started
    return _seconds_since_beat(folder) > SECONDS_UNTIL_DEAD


def _seconds_since_beat(folder: str) -> float:
    """By the clock of the storage, which may be another than this machine's."""
    try:
        now, path = tempfile.mkstemp(dir=folder, prefix="._now.json.", suffix=".draft")
    except OSError:  # Nothing can be written here, so nothing can be taken either.
        return 0.0
    try:
        return os.fstat(now).st_mtime - os.stat(os.path.join(folder, OWNER)).st_mtime
    except FileNotFoundError:  # The owner has just left.
        return SECONDS_UNTIL_DEAD + 1
    finally:
        os.close(now)
        with suppress(FileNotFoundError):  # The owner may have swept it up.
            os.unlink(path)
