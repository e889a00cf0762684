"""A lock among all processes that see a folder."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_MOST_SECONDS = 60.0
"Who holds a lock needs a moment, unless its process has been stopped."


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Nobody else is in a block with this path at the same time. The file is gone afterwards.

    The kernel frees the lock of a process that dies. Raises OSError if the file cannot be made, or
    the lock cannot be had for a minute.
    """
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        _lock(descriptor)
        if _is_still(path, descriptor):
            break
        os.close(descriptor)  # Its last holder has removed it. What is there now is another.
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    deadline = time.monotonic() + _MOST_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise TimeoutError(f"locked by another process for {_MOST_SECONDS:g} s") from error
            time.sleep(0.02)
        except OSError:  # Some network storage knows no locks.
            return


def _is_still(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
