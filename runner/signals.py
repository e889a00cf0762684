"""Ctrl-C and SIGTERM: once to stop in order, twice without grace, three times at once.

While Ray is at work a signal is a wish that the run looks at: an exception in the middle of Ray's
own calls would break them. Before and after, it ends the command where it is.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from jobs.errors import JobError, StoppedError
from jobs.stop import Stop

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _SignalError(BaseException):
    """Passes through those who catch every Exception."""


class Signals:
    """What signals ask for."""

    def __init__(self) -> None:
        self.stop = Stop()
        self._number = signal.SIGINT
        self._num_signals = 0

    @property
    def exit_code(self) -> int:
        """The code that a shell gives to a command that a signal has ended."""
        return 128 + self._number

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Takes the signals over for the time of the block, if it runs in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        try:
            yield
        except JobError:
            raise
        except BaseException as error:
            # Libraries that are broken off while they are imported raise what they like.
            if self._num_signals:
                raise StoppedError("stopped.") from error
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._number = signal.Signals(number)
        self._num_signals += 1
        if self._num_signals > 2:  # Cleaning up takes too long. Ray's processes end with this one.
            os._exit(self.exit_code)
        if not self.stop.is_watched:
            raise _SignalError
        if self._num_signals == 1:
            self.stop.ask()
        else:
            self.stop.hurry()
