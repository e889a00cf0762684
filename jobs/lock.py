"""A lock among all processes that see a folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Nobody else is in a block with this path at the same time. The file is gone afterwards.

    The kernel frees the lock of a process that dies. Raises OSError if the file cannot be made.
    """
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        with suppress(OSError):  # Some network storage knows no locks.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_still(path, descriptor):
            break
        os.close(descriptor)  # Its last holder has removed it. What is there now is another.
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


def _is_still(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
