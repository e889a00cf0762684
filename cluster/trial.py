"""A shard's way to its report, whatever its workers come to. No Ray in here.

whole > lost, once > whole > lost again > search: no row at all is tried, then halves, until one is
left. If no row at all is enough to lose a worker, no row is to blame, and the shard is given up.
row alone > lost > row alone > lost again > the row is an error > whole, without it
search that finds no row > whole: it was chance, so the same is done again, and the bytes are equal
out of memory > whole, with half the batch

A worker may read another shard beside the one that it answers. What goes wrong may be the other's
doing: from then on both are done alone, and only of a shard alone it is believed that it raises,
or does not fit into memory.
"""

import dataclasses
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from jobs.completion import RowError
from jobs.errors import WorkerError
from jobs.lessons import Lessons
from jobs.plan import Shard

logger = logging.getLogger(__name__)

_LOSSES = 2
"Workers that a shard, and then a row alone, may cost before chance is ruled out."
_SEARCHES = 3
"Searches that find nothing before a shard is given up."
_CULPRITS = 8
"Rows of one shard that may end their worker before it is given up."

Cause = Literal["died", "hung", "raised", "short of memory"]
_MESSAGES: dict[Cause, str] = {
    "died": "The worker process ended each time this row was answered, the last times alone.",
    "hung": "The row was not answered in time, the last times alone.",
}
_REMEDIES: dict[Cause, str] = {
    "died": " Fewer rows together (--rows-per-shard) may help.",
    "hung": " Give it more time with --shard-timeout.",
}


@dataclass(slots=True, eq=False)
class Trial:
    """A shard, and what has come of it so far."""

    shard: Shard
    retry: bool = False
    "Only the rows of a finished part whose error may pass."
    is_alone: bool = False
    "No other shard is read beside it any more, nor is it read beside another."
    lessons: Lessons = field(default_factory=Lessons)
    suspects: tuple[int, int] | None = None
    "Rows [start, stop) of which one may be to blame; None while the shard is done as a whole."
    is_innocent_without_rows: bool = False
    "True once the search has shown that it takes a row."
    losses: int = 0
    searches: Counter[str] = field(default_factory=Counter)
    "By cause, how many searches there were."

    @property
    def may_overlap(self) -> bool:
        """True if another shard may be read while this one is answered, and the other way round."""
        return not (self.retry or self.is_alone)

    @property
    def rows_to_try(self) -> tuple[int, int] | None:
        """Rows [start, stop) to be tried alone next; None for the shard as a whole."""
        if self.suspects is None:
            return None
        start, stop = self.suspects
        if not self.is_innocent_without_rows:
            return start, start
        return start, max(start + 1, (start + stop) // 2)

    @property
    def where(self) -> str:
        """What is being done, in words."""
        rows = self.rows_to_try
        if rows is None:
            return f"on shard {self.shard.index}"
        which = {0: "no row", 1: f"row {rows[0]}"}.get(
            rows[1] - rows[0], f"rows {rows[0]} to {rows[1] - 1}"
        )
        return f"on shard {self.shard.index}, trying {which} alone"

    def passed(self) -> None:
        """The rows that were tried alone are not to blame."""
        assert self.suspects is not None and self.rows_to_try is not None
        rest = self.rows_to_try[1], self.suspects[1]
        self.losses, self.is_innocent_without_rows = 0, True
        self.suspects = rest if rest[0] < rest[1] else None

    def lost(self, cause: Cause, reason: str) -> None:
        """A worker was lost to what was to be done next. Chance may repeat; a raised error will.

        Raises WorkerError if the shard is given up.
        """
        self.losses += 1
        is_certain = cause == "raised" or self.losses == _LOSSES
        rows = self.rows_to_try
        if rows is None:
            if is_certain:
                self._search(cause, reason)
        elif rows[1] - rows[0] > 1:
            self.suspects, self.losses = rows, 0
        elif rows[1] == rows[0]:
            if is_certain:
                raise WorkerError(
                    f"shard {self.shard.index} cannot be done, and no row of it is to blame: "
                    f"{reason}{_REMEDIES.get(cause, '')}"
                )
        elif is_certain:
            self._convict(rows[0], cause, reason)

    def short_of_memory(self, reason: str, rows_per_batch: int) -> None:
        """A batch did not fit into memory. Raises WorkerError if it had a single row."""
        halvings = self.lessons.halvings
        rows = min(rows_per_batch >> halvings, self.shard.num_rows)
        if rows <= 1:
            raise WorkerError(f"{reason}. A single row's batch does not help.")
        while rows_per_batch >> halvings >= rows:
            halvings += 1
        self.lessons = dataclasses.replace(self.lessons, halvings=halvings)
        self.losses, self.suspects = 0, None

    def _search(self, cause: Cause, reason: str) -> None:
        self.searches[cause] += 1
        if self.searches[cause] > (1 if cause == "raised" else _SEARCHES):
            raise WorkerError(
                f"shard {self.shard.index} is lost again and again, and no row of it alone is to "
                f"blame; the last: {reason}{_REMEDIES.get(cause, '')}"
            )
        self.losses, self.is_innocent_without_rows = 0, False
        self.suspects = self.shard.start, self.shard.stop

    def _convict(self, row_id: int, cause: Cause, reason: str) -> None:
        if len(self.lessons.errors) == _CULPRITS:
            raise WorkerError(
                f"shard {self.shard.index} has more than {_CULPRITS} rows that end their worker; "
                f"the last: {reason}{_REMEDIES.get(cause, '')}"
            )
        code: Literal["engine_error", "worker_crash"] = "worker_crash"
        if cause == "raised":
            code = "engine_error"
        error = RowError(
            "generate",
            code,
            _MESSAGES.get(cause, reason),
            attempts=1 if cause == "raised" else _LOSSES,
            retryable=True,
        )
        errors = (*self.lessons.errors, (row_id, error))
        self.lessons = dataclasses.replace(self.lessons, errors=errors)
        self.losses, self.suspects = 0, None
        self.searches.clear()


@dataclass(slots=True)
class Call:
    """What a worker is doing."""

    worker: Any
    "A worker in another process: Ray makes its methods up as they are called."
    trial: Trial | None
    "None while the worker opens the model."
    ahead: Trial | None = None
    "Whose shard the worker reads meanwhile."
    since: float = field(default_factory=time.monotonic)

    def failed(self, cause: Cause | None, reason: str, rows_per_batch: int) -> Trial:
        """The shard, to be done again in the way that its losses suggest. No cause: by chance.

        Raises WorkerError if it is given up.
        """
        trial, beside = self.trial, self.ahead
        assert trial is not None, f"there was no shard {self.where}"
        trial.is_alone = True
        if beside is not None:
            beside.is_alone = True
        if cause == "short of memory":
            logger.warning("%s; %s", reason, "again, alone" if beside else "the batch is halved")
        if cause in ("died", "hung") or (cause == "raised" and beside is None):
            trial.lost(cause, reason)
        elif cause == "short of memory" and beside is None:
            trial.short_of_memory(reason, rows_per_batch)
        return trial

    @property
    def where(self) -> str:
        """What is being done, in words."""
        return "while it was starting" if self.trial is None else self.trial.where


def reason_of(error: Exception) -> str:
    """Why a worker died, in one line: Ray puts a long report around what matters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A constructor's own exception stands last; of a killed process only the first line speaks.
    return lines[-1] if getattr(error, "actor_init_failed", False) else lines[0]
