"""Rows of a batch that take turns: one that ends makes room for the next.

    fixed    |#######|####...|######.|   . a place that stands empty until the batch has ended
    refill   |#######|####nnn|######n|   n a row that waited

Who comes in depends on nothing but the rows and their order: when each ends is their own affair,
and so the same turns are taken whenever the batch is run again.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_SHARE = 8
"Rows come in when an eighth of the places is free: prompts run better side by side."


@dataclass(frozen=True, slots=True)
class Turns:
    """How many rows of a batch are live at a time."""

    max_live: int
    max_tokens: int
    "Most tokens that the live rows may come to hold together; a row alone may hold more."


class Queue:
    """Which rows of a batch are live, and which wait. They come in by their order."""

    def __init__(self, sizes: Sequence[int], turns: Turns) -> None:
        """sizes: tokens that each row may come to hold."""
        self._sizes = sizes
        self._turns = turns
        self._waiting = deque(range(len(sizes)))
        self._live: set[int] = set()

    @property
    def num_open(self) -> int:
        """Places that are taken, or that a waiting row will take."""
        return min(self._turns.max_live, len(self._live) + len(self._waiting))

    def arrivals(self) -> list[int]:
        """Rows that come in before the next step."""
        arriving: list[int] = []
        max_live, live = self._turns.max_live, self._live
        if live and (max_live - len(live)) * _SHARE < max_live:
            return arriving
        held = sum(self._sizes[row] for row in live)
        while self._waiting and len(live) < max_live:
            held += self._sizes[self._waiting[0]]
            if live and held > self._turns.max_tokens:
                break
            arriving.append(self._waiting.popleft())
            live.add(arriving[-1])
        return arriving

    def leave(self, row: int) -> bool:
        """Takes out a row. True if it was live, false if it was still waiting."""
        if row in self._live:
            self._live.discard(row)
            return True
        self._waiting.remove(row)
        return False
