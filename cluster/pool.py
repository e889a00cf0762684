"""The pool: shards out to workers, reports back. The only ray.remote and ray.wait.

Each worker has one call in flight, so that the shard that kills a worker is known. What is chance
is tried again: a dead worker's shard goes to a new one. What is certain is not: an exception that
a worker raises ends the job.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from cluster.placement import Seats
from jobs.errors import JobError, WorkerError
from jobs.plan import Plan, Shard
from jobs.report import ShardReport
from workers.worker import Worker

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
"Workers that may be lost to one shard, or in a row before any has opened."
_WAIT_SECONDS = 1.0
"How long Ctrl-C may wait to be noticed."


_Handle = Any
"A worker in another process: Ray makes its methods up as they are called."


@contextmanager
def hire_workers(plan: Plan, seats: Seats) -> Iterator["Pool"]:
    """Starts workers, and goes on when the first has opened the model. Ends them all at last.

    Raises what the worker raised if it cannot; WorkerError if workers keep dying.
    """
    pool = Pool(plan, seats)
    try:
        pool.open()
        yield pool
    finally:
        pool.stop()


class Pool:
    """Workers, and the shards that they are given."""

    def __init__(self, plan: Plan, seats: Seats) -> None:
        self._actor_class = ray.remote(
            max_restarts=0, max_task_retries=0, num_cpus=seats.cpus, num_gpus=seats.gpus
        )(Worker)
        # Put once: the plan names every input file, and there may be many.
        self._plan = ray.put(plan)
        self._num_workers = seats.num_workers
        self._calls: dict[ray.ObjectRef[ShardReport | None], tuple[_Handle, Shard | None]] = {}
        "The one call that each busy worker has in flight, and its shard; None while it opens."
        self._idle: list[_Handle] = []
        self._waiting: deque[Shard] = deque()
        self._losses: dict[Shard | None, int] = {}

    def open(self) -> None:
        """Hires the workers and waits for the first."""
        for _ in range(self._num_workers):
            self._hire()
        while not self._idle:
            self._wait()

    def run_shards(self, shards: Sequence[Shard]) -> Iterator[ShardReport]:
        """Runs every shard once and yields its report when it is done, in whatever order.

        Raises what a worker raised; WorkerError if workers keep dying.
        """
        self._waiting.extend(shards)
        num_left = len(shards)
        while num_left:  # Not: while calls are open; a worker may wait for a seat for ever.
            while self._idle and self._waiting:
                worker, shard = self._idle.pop(), self._waiting.popleft()
                self._calls[worker.run_shard.remote(shard)] = (worker, shard)
            self._dismiss_idle()
            for report in self._wait():
                num_left -= 1
                yield report

    def stop(self) -> None:
        """Ends every worker at once."""
        self._dismiss_idle()
        for worker, _ in self._calls.values():
            ray.kill(worker)
        self._calls.clear()

    def _hire(self) -> None:
        # The model is loaded by a call, not by the constructor: what that raises arrives whole.
        worker: _Handle = self._actor_class.remote(self._plan)
        self._calls[worker.open.remote()] = (worker, None)

    def _dismiss_idle(self) -> None:
        for worker in self._idle:
            ray.kill(worker)
        self._idle.clear()

    def _wait(self) -> list[ShardReport]:
        """Reports of the calls that have ended, if any have within a moment."""
        done, _ = ray.wait(list(self._calls), num_returns=1, timeout=_WAIT_SECONDS)
        reports = [self._finish(call) for call in done]
        return [report for report in reports if report is not None]

    def _finish(self, call: "ray.ObjectRef[ShardReport | None]") -> ShardReport | None:
        """Takes a call's outcome. Its worker is free, or replaced if it died."""
        worker, shard = self._calls.pop(call)
        try:
            report = ray.get(call)
        except (RayActorError, OutOfMemoryError) as error:
            self._replace(worker, shard, error)
            return None
        except RayTaskError as error:
            ray.kill(worker)
            raise _explain(error, shard) from error
        if shard is None:
            self._losses.pop(None, None)
            logger.debug("a worker is ready")
        self._idle.append(worker)
        return report

    def _replace(self, worker: _Handle, shard: Shard | None, error: Exception) -> None:
        ray.kill(worker)
        losses = self._losses[shard] = self._losses.get(shard, 0) + 1
        where = "while it was starting" if shard is None else f"on shard {shard.index}"
        if losses == _ATTEMPTS:
            raise WorkerError(
                f"{losses} workers were lost {where}; the last: {_reason(error)}"
            ) from error
        logger.warning(
            "worker lost %s (attempt %d of %d); trying it on a new one", where, losses, _ATTEMPTS
        )
        if shard is not None:
            self._waiting.appendleft(shard)
        self._hire()


def _reason(error: Exception) -> str:
    """Why a worker died, in one line: Ray puts a long report around what matters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A constructor's own exception stands last; of a killed process only the first line speaks.
    return lines[-1] if getattr(error, "actor_init_failed", False) else lines[0]


def _explain(error: RayTaskError, shard: Shard | None) -> JobError:
    """The worker's own error if a user can act on it, else one that names the shard."""
    logger.debug("%s", error)  # With the worker's traceback.
    cause = error.cause
    if isinstance(cause, JobError):
        return cause
    where = "while it was starting" if shard is None else f"on shard {shard.index}"
    return WorkerError(f"a worker failed {where}: {type(cause).__name__}: {cause}")
