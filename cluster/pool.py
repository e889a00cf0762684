"""The pool: shards out to workers, reports back. The only ray.remote and ray.wait.

Each worker has one call in flight, so that the shard that kills a worker is known. What is chance
is tried again: a dead worker's shard goes to a new one. What is certain is not: an exception that
a worker raises ends the job.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
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


def run_shards(plan: Plan, shards: Sequence[Shard], seats: Seats) -> Iterator[ShardReport]:
    """Runs every shard once and yields its report when it is done, in whatever order.

    Raises what a worker raised; WorkerError if workers keep dying.
    """
    pool = _Pool(plan, seats)
    try:
        yield from pool.run(shards)
    finally:
        pool.stop()


class _Pool:
    def __init__(self, plan: Plan, seats: Seats) -> None:
        self._actor_class = ray.remote(
            max_restarts=0, max_task_retries=0, num_cpus=seats.cpus, num_gpus=seats.gpus
        )(Worker)
        # Put once: the plan names every input file, and there may be many.
        self._plan = ray.put(plan)
        self._num_workers = seats.num_workers
        self._calls: dict[ray.ObjectRef[ShardReport | None], tuple[_Handle, Shard | None]] = {}
        self._waiting: deque[Shard] = deque()
        self._losses: dict[Shard | None, int] = {}

    def run(self, shards: Sequence[Shard]) -> Iterator[ShardReport]:
        """Yields a report for each shard."""
        self._waiting.extend(shards)
        for _ in range(self._num_workers):
            self._hire()
        num_left = len(shards)
        while num_left:  # Not: while calls are open; a worker may wait for a seat for ever.
            done, _ = ray.wait(list(self._calls), num_returns=1, timeout=_WAIT_SECONDS)
            for call in done:
                report = self._finish(call)
                if report is not None:
                    num_left -= 1
                    yield report

    def stop(self) -> None:
        """Ends every worker at once."""
        for worker, _ in self._calls.values():
            ray.kill(worker)
        self._calls.clear()

    def _hire(self) -> None:
        # The model is loaded by a call, not by the constructor: what that raises arrives whole.
        worker: _Handle = self._actor_class.remote(self._plan)
        self._calls[worker.open.remote()] = (worker, None)

    def _finish(self, call: "ray.ObjectRef[ShardReport | None]") -> ShardReport | None:
        """Takes a call's outcome, and gives its worker the next shard."""
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
        if self._waiting:
            following = self._waiting.popleft()
            self._calls[worker.run_shard.remote(following)] = (worker, following)
        else:
            ray.kill(worker)
        return report

    def _replace(self, worker: _Handle, shard: Shard | None, error: Exception) -> None:
        ray.kill(worker)
        losses = self._losses[shard] = self._losses.get(shard, 0) + 1
        where = "while it was starting" if shard is None else f"on shard {shard.index}"
        if losses == _ATTEMPTS:
            reason = str(error).strip().splitlines()[0]
            raise WorkerError(f"{losses} workers were lost {where}; the last: {reason}") from error
        logger.warning(
            "worker lost %s (attempt %d of %d); trying it on a new one", where, losses, _ATTEMPTS
        )
        if shard is not None:
            self._waiting.appendleft(shard)
        self._hire()


def _explain(error: RayTaskError, shard: Shard | None) -> JobError:
    """The worker's own error if a user can act on it, else one that names the shard."""
    logger.debug("%s", error)  # With the worker's traceback.
    cause = error.cause
    if isinstance(cause, JobError):
        return cause
    where = "while it was starting" if shard is None else f"on shard {shard.index}"
    return WorkerError(f"a worker failed {where}: {type(cause).__name__}: {cause}")
