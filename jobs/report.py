"""What a worker tells of a shard: counts and seconds, never rows."""

from collections import Counter
from dataclasses import dataclass, field, fields

from jobs.plan import Shard


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts that can be added up. Seconds are wall clock, summed over workers."""

    rows: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    "Rows with an error, by code."
    truncated: int = 0
    "Prompts that were cut to fit."
    out_of_room: int = 0
    "Answers that ended where a row may be no longer, before their own limit."
    prompt_tokens: int = 0
    new_tokens: int = 0
    batches: int = 0
    slot_steps: int = 0
    "Rows times steps of every batch, had each row stayed to its batch's end."
    read_seconds: float = 0.0
    tokenize_seconds: float = 0.0
    generate_seconds: float = 0.0
    write_seconds: float = 0.0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def record(self) -> dict[str, object]:
        """The counts by name, for JSON."""
        named: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self)}
        return named | {"failed": dict(self.failed), "idle_share": self.idle_share}

    @property
    def failed_rows(self) -> int:
        """Rows with an error."""
        return sum(self.failed.values())

    @property
    def idle_share(self) -> float:
        """Share of batch slots that stood empty because their row had ended before its batch."""
        return 1 - self.new_tokens / self.slot_steps if self.slot_steps else 0.0


@dataclass(frozen=True, slots=True)
class Part:
    """A finished file of output."""

    name: str
    num_rows: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ShardReport:
    """A finished shard."""

    shard: Shard
    part: Part
    counts: Counts
    seconds: float
    "Wall clock, from the order to the renamed part."
