"""A worker in a process of its own, as the pool hires it."""

from jobs.lessons import Lessons
from jobs.plan import Plan, Shard
from jobs.report import ShardReport


class WorkerProcess:
    """Passes on to a worker what it is told.

    What a worker is made of takes seconds to import. It is imported in that process, and not in
    the one that hires it, and by a method: what a constructor raises arrives without a cause.
    """

    def __init__(self, plan: Plan, run_id: str | None) -> None:
        self._plan = plan
        self._run_id = run_id

    def open(self) -> None:
        """See Worker, as of all methods."""
        from workers.worker import Worker

        self._worker = Worker(self._plan, self._run_id)
        self._worker.open()

    def run_shard(self, shard: Shard, lessons: Lessons, ahead: Shard | None) -> ShardReport:
        return self._worker.run_shard(shard, lessons, ahead)

    def retry_shard(self, shard: Shard, lessons: Lessons) -> ShardReport:
        return self._worker.retry_shard(shard, lessons)

    def try_rows(
        self, shard: Shard, start: int, stop: int, lessons: Lessons, *, retry: bool
    ) -> None:
        self._worker.try_rows(shard, start, stop, lessons, retry=retry)
