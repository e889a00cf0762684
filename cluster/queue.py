"""Whose turn it is: shards in order, and which of them each worker is to read ahead. No Ray here.

A worker that is given a shard is promised another, which it reads meanwhile, and which it is given
next. No two are promised the same, and none is promised what a worker that is free, or about to be,
will take before. A promise binds nobody: where all that waits is promised, a free worker takes the
promise that was made last, and the reading was for nothing.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from itertools import islice

from cluster.trial import Trial


class ShardQueue:
    """Trials that wait for a worker."""

    def __init__(self) -> None:
        self._waiting = deque[Trial]()
        self._promised: dict[Hashable, Trial] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def extend(self, trials: Iterable[Trial]) -> None:
        """Adds trials behind those that wait."""
        self._waiting.extend(trials)

    def put_back(self, trial: Trial) -> None:
        """Adds a trial that is to be gone on with before all others."""
        self._waiting.appendleft(trial)

    def take(self, worker: Hashable, *, num_free: int) -> tuple[Trial, Trial | None]:
        """What a worker is to do now, and what it is to read meanwhile.

        num_free: other workers that have nothing to do yet, and will take what comes next.
        """
        trial = self._choose(worker)
        self._waiting.remove(trial)
        self._promised = {w: t for w, t in self._promised.items() if t is not trial}
        if not trial.may_overlap:
            return trial, None
        left = (other for other in self._unpromised() if other.may_overlap)
        ahead = next(islice(left, num_free, None), None)
        if ahead is not None:
            self._promised[worker] = ahead
        return trial, ahead

    def forget(self, worker: Hashable) -> None:
        """Takes back what a worker was promised: it is gone."""
        self._promised.pop(worker, None)

    def _choose(self, worker: Hashable) -> Trial:
        promised, first = self._promised.pop(worker, None), self._waiting[0]
        if promised is not None and first.may_overlap:
            return promised
        return next(self._unpromised(), self._waiting[-1])

    def _unpromised(self) -> Iterator[Trial]:
        promised = {id(trial) for trial in self._promised.values()}
        return (trial for trial in self._waiting if id(trial) not in promised)
