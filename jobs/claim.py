"""One owner of an output folder at a time. A claim that has died is told from one that lives.

The owner is named in _owner.json. On the same machine its process either runs or does not. From
another machine only its heartbeat can be heard: it touches the file every few seconds. Who looks at
a claim in order to take it holds a lock meanwhile, so that of many one gets it.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from jobs.errors import OutputError, RefusedError
from jobs.folder import readable
from jobs.owner import Owner, start_of, this_place, this_process
from jobs.storage import Held, Storage, storage_of

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
    me, storage = this_process(), storage_of(folder)
    made = _make_folder(storage, folder)
    try:
        with storage.locked(LOCK):
            dead = _remove_dead_owner(storage, folder)
            held = storage.create(OWNER, json.dumps(asdict(me)).encode())
    except FileExistsError as error:
        raise _refusal(folder, read_owner(folder)) from error
    except OSError as error:
        storage.unmake(made)
        raise OutputError(f"{folder}: cannot be made ready: {error}") from error
    stop = threading.Event()
    heart = threading.Thread(target=_beat, args=(held, stop), daemon=True)
    try:
        heart.start()
        yield Claim(folder, me.run_id, dead)
    finally:
        stop.set()
        heart.join()
        held.close()
        with suppress(OSError), storage.locked(LOCK):
            owner = read_owner(folder)
            if owner is not None and owner.run_id == me.run_id:
                storage.delete(OWNER)
        storage.unmake(made)  # A run that has written nothing leaves nothing.


def _make_folder(storage: Storage, folder: str) -> list[str]:
    try:
        return storage.make()
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made: {error}. Choose another folder.") from error


def _remove_dead_owner(storage: Storage, folder: str) -> str | None:
    """Removes a dead claim and says whose it was. Raises RefusedError for a living one."""
    if not storage.exists(OWNER):
        return None
    refuse_owned(folder)
    owner = read_owner(folder)
    storage.delete(OWNER)
    return "an unknown run" if owner is None else str(owner)


def refuse_owned(folder: str) -> None:
    """Raises RefusedError if a living run has the folder."""
    owner, storage = read_owner(folder), storage_of(folder)
    with readable(folder):
        if not storage.exists(OWNER) or _is_dead(storage, owner):
            return
    raise _refusal(folder, owner)


def _refusal(folder: str, owner: Owner | None) -> RefusedError:
    by = "a run" if owner is None else str(owner)
    elsewhere = owner is None or owner.place != this_place()
    remedy = f" Should that run be dead, try again in {SECONDS_UNTIL_DEAD:.0f} s." * elsewhere
    return RefusedError(f"{folder}: in use by {by}. Wait for it, or choose another folder.{remedy}")


def check_owner(folder: str, run_id: str) -> None:
    """Raises RefusedError if the folder is no longer this run's: nothing more may be written."""
    owner = read_owner(folder)
    for _ in range(_LOOKS):
        with readable(folder):
            is_pause = owner is None and storage_of(folder).exists()
        if is_pause:  # A network's, which may pass.
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            owner = read_owner(folder)
    if owner is None or owner.run_id != run_id:
        by = "nobody's any more" if owner is None else f"taken over by {owner}"
        raise RefusedError(
            f"{folder}: the folder is {by}. This run ends; what it has finished is kept."
        )


def read_owner(folder: str) -> Owner | None:
    """Who has the folder, dead or alive; None if nobody or if it cannot be read."""
    storage = storage_of(folder)
    try:
        return Owner(**json.loads(storage.read(OWNER)))
    except (OSError, ValueError, TypeError):
        return None


def _beat(held: Held, stop: threading.Event) -> None:
    while not stop.wait(SECONDS_BETWEEN_BEATS):
        with suppress(OSError):  # A network's pause. The next beat may come through.
            held.touch()


def _is_dead(storage: Storage, owner: Owner | None) -> bool:
    if owner is not None and owner.place == this_place():
        started = start_of(owner.pid)
        if started != "":
            return started != owner.started
    try:
        return storage.seconds_since(OWNER) > SECONDS_UNTIL_DEAD
    except FileNotFoundError:  # The owner has just left.
        return True
