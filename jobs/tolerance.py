"""What a run puts up with before it is given up. Nothing here changes an answer."""

from dataclasses import dataclass
from fractions import Fraction
from math import isfinite

from jobs.errors import SettingError


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Errors, silence, and the time that is left when a run is told to stop."""

    max_errors: str | None = None
    "Most rows with an error, as a number or a share of all rows: 100 or 5%. None: all but one."
    shard_timeout: float | None = None
    "Seconds after which a shard's worker is taken for hung. None: from the speed of the others."
    grace: float = 3.0
    "Seconds that running shards are given when the run is told to stop."

    def __post_init__(self) -> None:
        self.most_errors(0)
        for name, value in (("shard_timeout", self.shard_timeout), ("grace", self.grace)):
            if value is not None and not (isfinite(value) and value >= 0):
                raise SettingError(f"{name} must be a number of seconds, at least 0, got {value}.")

    def most_errors(self, num_rows: int) -> int | None:
        """How many rows of so many may be errors; None if nothing was said."""
        if self.max_errors is None:
            return None
        text = self.max_errors.strip()
        try:
            if text.endswith("%") and 0 <= (share := Fraction(text[:-1])) <= 100:
                return int(num_rows * share / 100)
            if not text.endswith("%") and int(text) >= 0:
                return int(text)
        except (ValueError, ZeroDivisionError):
            pass
        raise SettingError(
            f"max_errors must be a number of rows or a share from 0% to 100%, got {text!r}."
        )
