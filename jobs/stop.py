"""A wish to stop, made at one end of the house and looked at from the other."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from jobs.errors import StoppedError


class Stop:
    """Asked for once; those who can stop look at it now and then."""

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._is_watched = self._is_hurried = False

    def ask(self) -> None:
        """From now on no new work is begun."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()

    def hurry(self) -> None:
        """No grace is given any more."""
        self.ask()
        self._is_hurried = True

    def check(self) -> None:
        """Raises StoppedError if it was asked for. To be called where nothing runs yet."""
        if self._asked_at is not None:
            raise StoppedError("stopped before any row was answered.")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block somebody looks, so that a wish is enough."""
        self._is_watched = True
        try:
            yield
        finally:
            self._is_watched = False

    @property
    def is_watched(self) -> bool:
        """True while somebody looks."""
        return self._is_watched

    @property
    def is_asked(self) -> bool:
        """True if no new work is to be begun."""
        return self._asked_at is not None

    def is_over(self, grace: float) -> bool:
        """True if what was running has had its seconds of grace."""
        if self._asked_at is None:
            return False
        return self._is_hurried or time.monotonic() - self._asked_at >= grace
