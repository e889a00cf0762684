"""The watchdog: how long a shard may take, and how long nothing may be said."""

import time

from jobs.plan import Shard
from jobs.report import ShardReport
from jobs.tolerance import Tolerance

_LEAST_SECONDS = 900.0
_TIMES = 10.0
"A shard may take so many times as long a row as the slowest that was seen."
_SECONDS_OF_SILENCE = 30.0


class Watch:
    """Learns from finished shards how long one may take."""

    def __init__(self, tolerance: Tolerance) -> None:
        self._asked = tolerance.shard_timeout
        self._slowest = 0.0
        self._last_news = time.monotonic()

    def learn(self, report: ShardReport) -> None:
        """Takes a finished shard for a measure."""
        self._slowest = max(self._slowest, report.seconds / max(report.shard.num_rows, 1))

    def is_hung(self, shard: Shard, since: float) -> bool:
        """True if a shard that was begun then should have been done by now."""
        most = self._most_seconds(shard)
        return most is not None and time.monotonic() - since > most

    def is_silent(self, *, is_news: bool) -> bool:
        """True if there has been no news for so long that something should be said."""
        now = time.monotonic()
        if is_news:
            self._last_news = now
        if now - self._last_news < _SECONDS_OF_SILENCE:
            return False
        self._last_news = now
        return True

    def _most_seconds(self, shard: Shard) -> float | None:
        """None as long as there is no measure, or if none is wanted."""
        if self._asked is not None:
            return self._asked or None
        if not self._slowest:
            return None
        return max(_LEAST_SECONDS, _TIMES * self._slowest * shard.num_rows)
