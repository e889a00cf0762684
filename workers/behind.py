"""Encoding and writing what is answered, while the next batch runs."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from jobs.drafts import PartWriter
from jobs.rows import Rows
from workers.tally import Clock


class WriteBehind:
    """Writes one stretch of a part at a time, in order, in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="write behind")
        self._pending: Future[None] | None = None
        self._clock = Clock()

    @property
    def is_busy(self) -> bool:
        """True if a stretch is being written, or was and nobody has looked yet."""
        return self._pending is not None

    @contextmanager
    def settled(self, clock: Clock) -> Iterator[None]:
        """However the block is left, nothing is being written any more. The clock counts waiting.

        What the block raises comes before what writing has raised.
        """
        self._clock = clock
        try:
            yield
        finally:
            pending, self._pending = self._pending, None
            if pending is not None:
                wait([pending])

    def append(self, writer: PartWriter, encode: Callable[[], Rows]) -> None:
        """Has a stretch encoded and written, once the one before is. Raises what that has raised.

        So there are two stretches at most: one that is written, and one that the caller fills.
        """
        self.finish()
        self._pending = self._thread.submit(_write, writer, encode, self._clock)

    def finish(self) -> None:
        """Returns when all is written. Raises what writing has raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._clock.stage("write_wait"):
                pending.result()


def _write(writer: PartWriter, encode: Callable[[], Rows], clock: Clock) -> None:
    with clock.stage("write"):
        writer.append(encode())
