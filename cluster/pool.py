"""The pool: shards out to workers, reports back. The only ray.remote and ray.wait.

Each worker has one call in flight, so that the shard that kills a worker is known. What becomes of
a shard whose worker is lost stands in trial.py, and whose turn it is in queue.py.
"""

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from cluster.placement import Resources, Seats
from cluster.process import WorkerProcess
from cluster.queue import ShardQueue
from cluster.trial import Call, Cause, Trial, reason_of
from cluster.watch import Watch
from jobs.errors import JobError, MemoryShortError, WorkerError
from jobs.plan import Plan, Shard
from jobs.report import ShardReport
from jobs.stop import Stop
from jobs.tolerance import Tolerance

logger = logging.getLogger(__name__)

_ATTEMPTS = 3  # Workers that may be lost in a row while they start.
_WAIT_SECONDS = 0.5  # How long a wish to stop may wait to be noticed.


@contextmanager
def hire_workers(
    plan: Plan,
    seats: Seats,
    *,
    run_id: str | None = None,
    tolerance: Tolerance | None = None,
    stop: Stop | None = None,
) -> Iterator["Pool"]:
    """Starts workers, and goes on when the first has opened the model. Ends them all at last.

    run_id: the run that must own the output folder while parts are written.
    Raises what a worker raised; WorkerError if workers keep dying; StoppedError.
    """
    pool = Pool(plan, seats, run_id, tolerance or Tolerance(), stop or Stop())
    try:
        pool.open()
        yield pool
    finally:
        pool.stop()


class Pool:
    """Workers, and the shards that they are given."""

    def __init__(
        self, plan: Plan, seats: Seats, run_id: str | None, tolerance: Tolerance, stop: Stop
    ) -> None:
        self._actor_class = ray.remote(
            max_restarts=0, max_task_retries=0, num_cpus=seats.cpus, num_gpus=seats.gpus
        )(WorkerProcess)
        # Put once: the plan names every input file, and there may be many.
        self._plan = ray.put(plan)
        self._rows_per_batch = plan.job.packing.rows_per_batch
        self._run_id, self._seats = run_id, seats
        self._grace, self._stop = tolerance.grace, stop
        self._watch = Watch(tolerance)
        self._calls: dict[ray.ObjectRef[Any], Call] = {}
        self._idle: list[Any] = []
        self._queue, self._lost_at_start = ShardQueue(), 0

    def open(self) -> None:
        """Hires the workers and waits for the first."""
        for _ in range(self._seats.num_workers):
            self._hire()
        while not self._idle:
            self._stop.check()
            self._wait()
        self._stop.check()

    def run_shards(
        self, shards: Sequence[Shard], *, retried: Collection[Shard] = ()
    ) -> Iterator[ShardReport]:
        """Runs every shard once and yields its report when it is done, in whatever order.

        retried: finished ones; only rows whose error may pass are answered again.
        Ends early if it is asked to stop. Raises what a worker raised, and WorkerError.
        """
        self._queue.extend(Trial(shard, shard in retried) for shard in shards)
        num_left = len(shards)
        while num_left:  # Not: while calls are open; a worker may wait for a seat for ever.
            if not self._stop.is_asked:
                self._hand_out()
            elif self._stop.is_over(self._grace) or not any(c.trial for c in self._calls.values()):
                return
            self._dismiss_idle()
            for report in self._wait():
                num_left -= 1
                yield report

    def stop(self) -> None:
        """Ends every worker at once."""
        self._dismiss_idle()
        for call in self._calls.values():
            ray.kill(call.worker)
        self._calls.clear()

    def _hire(self) -> None:
        # The model is loaded by a call, not by the constructor: what that raises arrives whole.
        worker: Any = self._actor_class.remote(self._plan, self._run_id)
        self._calls[worker.open.remote()] = Call(worker, None)

    def _hand_out(self) -> None:
        while self._idle and self._queue:
            worker = self._idle.pop()
            num_opening = sum(call.trial is None for call in self._calls.values())
            trial, ahead = self._queue.take(worker, num_free=len(self._idle) + num_opening)
            shard, lessons, rows = trial.shard, trial.lessons, trial.rows_to_try
            if rows is not None:
                ref = worker.try_rows.remote(shard, *rows, lessons, retry=trial.retry)
            elif trial.retry:
                ref = worker.retry_shard.remote(shard, lessons)
            else:
                ref = worker.run_shard.remote(shard, lessons, ahead and ahead.shard)
            self._calls[ref] = Call(worker, trial, ahead)

    def _dismiss_idle(self) -> None:
        for worker in self._idle:
            ray.kill(worker)
        self._idle.clear()

    def _wait(self) -> list[ShardReport]:
        """Reports of the calls that have ended, if any have within a moment."""
        ray.wait(list(self._calls), num_returns=1, timeout=_WAIT_SECONDS)
        done, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        reports = [self._finish(ref, self._calls.pop(ref)) for ref in done]
        self._end_hung()
        self._break_silence(is_news=bool(done))
        return [report for report in reports if report]

    def _finish(self, ref: "ray.ObjectRef[Any]", call: Call) -> ShardReport | None:
        """Takes a call's outcome. Its worker is free, or replaced if it is lost."""
        try:
            report: ShardReport | None = ray.get(ref)
        except OutOfMemoryError as error:  # Ray has ended the worker to save the machine.
            # Something else may have filled it once. Twice, and it is the batch.
            again = call.trial is not None and call.trial.losses > 0
            self._lose(call, "short of memory" if again else "died", error)
            return None
        except RayActorError as error:
            # A node that is taken away with notice says nothing about the shard.
            self._lose(call, None if getattr(error, "preempted", False) else "died", error)
            return None
        except RayTaskError as error:
            self._take_error(call, error)
            return None
        self._idle.append(call.worker)
        if call.trial is None:
            self._lost_at_start = 0
            logger.debug("a worker is ready")
        elif report is None:
            call.trial.passed()
            self._queue.put_back(call.trial)
        else:
            self._watch.learn(report)
        return report

    def _take_error(self, call: Call, error: RayTaskError) -> None:
        """What a worker raised: a user's business, a batch too big, or a row that cannot be run."""
        logger.debug("%s", error)  # With the worker's traceback.
        cause = error.cause
        if isinstance(cause, MemoryShortError) and call.trial is not None:
            self._idle.append(call.worker)
            self._repeat(call, "short of memory", str(cause))
            return
        self._end(call.worker)
        if isinstance(cause, JobError):
            raise cause
        said = f"{type(cause).__name__}: {cause}"
        if call.trial is None:
            raise WorkerError(f"a worker failed {call.where}: {said}") from error
        logger.warning("a worker failed %s: %s", call.where, said)
        # A new one, since a GPU is of no more use to a process in which one of its calls failed.
        self._hire()
        self._repeat(call, "raised", said)

    def _lose(self, call: Call, cause: Cause | None, error: Exception) -> None:
        """Replaces a worker that is gone, unless that happens again and again."""
        self._end(call.worker)
        reason = reason_of(error)
        logger.warning(
            "worker lost %s: %s; going on with a new one", call.where, reason.rstrip(".")
        )
        if call.trial is not None:
            self._repeat(call, cause, reason)
        else:
            self._lost_at_start += 1
            if self._lost_at_start == _ATTEMPTS:
                raise WorkerError(
                    f"{_ATTEMPTS} workers were lost {call.where}; the last: {reason}"
                ) from error
        self._hire()

    def _repeat(self, call: Call, cause: Cause | None, reason: str) -> None:
        self._queue.put_back(call.failed(cause, reason, self._rows_per_batch))

    def _end(self, worker: Any) -> None:
        self._queue.forget(worker)
        ray.kill(worker)

    def _end_hung(self) -> None:
        for ref, call in list(self._calls.items()):
            if call.trial is not None and self._watch.is_hung(call.trial.shard, call.since):
                del self._calls[ref]
                self._lose(call, "hung", TimeoutError("There was no answer in time."))

    def _break_silence(self, *, is_news: bool) -> None:
        """Says now and then what is waited for."""
        if not self._watch.is_silent(is_news=is_news):
            return
        if busy := [call for call in self._calls.values() if call.trial is not None]:
            oldest = min(busy, key=lambda call: call.since)
            seconds = time.monotonic() - oldest.since
            logger.info("%d busy; the longest %s, for %.0f s", len(busy), oldest.where, seconds)
            return
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        resources = Resources(free.get("CPU", 0.0), free.get("GPU", 0.0))
        logger.warning("waiting for a worker: it takes %s; %s are free", self._seats, resources)
