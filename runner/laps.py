"""Where the seconds of a run go, from the command to its last part."""

import time


class Laps:
    """Wall-clock seconds of one stage after the other."""

    def __init__(self, begun: float | None = None) -> None:
        """begun: when the command was begun, by time.perf_counter(), if it was one."""
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()
        if begun is not None:
            self.seconds["imports"] = self._last - begun

    def end(self, stage: str) -> None:
        """The time since the last stage belongs to this one."""
        now = time.perf_counter()
        self.seconds[stage] = now - self._last
        self._last = now
