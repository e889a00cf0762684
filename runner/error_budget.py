"""How many rows may be errors before a run ends."""

from collections.abc import Sequence

from jobs.errors import WorkerError
from jobs.plan import Plan
from jobs.report import Counts, ShardReport
from jobs.tolerance import Tolerance


class ErrorBudget:
    """How many rows may still be errors."""

    def __init__(self, plan: Plan, tolerance: Tolerance, kept: Sequence[ShardReport]) -> None:
        self._asked = tolerance.max_errors
        self._most = tolerance.most_errors(plan.num_rows)
        self._counts = Counts()
        for report in kept:
            self.add(report)

    def add(self, report: ShardReport) -> None:
        """Takes a finished shard. Raises WorkerError if there are now too many errors."""
        self._counts += report.counts
        failed = self._counts.failed_rows
        if self._most is not None and failed > self._most:
            raise WorkerError(
                f"{failed} rows are errors, and --max-errors is {self._asked}: "
                f"{say_codes(self._counts)}. Mend the cause and start afresh, or allow more and "
                "go on with --resume."
            )


def say_codes(counts: Counts) -> str:
    """How many rows have which error."""
    return ", ".join(f"{code} {number}" for code, number in sorted(counts.failed.items()))
