"""What earlier attempts at a shard have taught. With the shard and the job it decides its bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobs.completion import RowError


@dataclass(frozen=True, slots=True)
class Lessons:
    """Rows that must not be run again, and how small batches must be."""

    errors: tuple[tuple[int, RowError], ...] = ()
    "Rows that have ended their worker, by row_id, with the error that each gets instead."
    halvings: int = 0
    "How often the batch was halved for want of memory."

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Lessons":
        """The lessons that dataclasses.asdict() has turned to JSON."""
        errors = tuple((row_id, RowError(**error)) for row_id, error in record["errors"])
        return cls(errors, record["halvings"])
