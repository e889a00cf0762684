"""What a worker tells of a shard: counts and seconds, never rows."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import inf, isfinite
from typing import Any

from jobs.lessons import Lessons
from jobs.plan import Shard

_LATER = (
    "read_wait_seconds", "write_wait_seconds",
    "scored_tokens", "scored_bytes", "scored_words", "loglikelihood", "greedy",
    "labelled", "right",
)  # fmt: skip
"Counts that records of earlier versions lack."


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
    scored_tokens: int = 0
    "Of texts, continuations, and all choices."
    scored_bytes: int = 0
    "Of texts and continuations, and so the next two."
    scored_words: int = 0
    loglikelihood: float = 0.0
    "Nats."
    greedy: int = 0
    "Rows that greedy decoding would have written."
    labelled: Counter[str] = field(default_factory=Counter)
    "Rows of choices with a label, by the ways in which the likeliest can be told."
    right: Counter[str] = field(default_factory=Counter)
    "Those of them whose likeliest choice is the labelled one."
    halved: int = 0
    "Shards whose batches were made smaller for want of memory."
    batches: int = 0
    slot_steps: int = 0
    "Rows times steps of every batch, had each row stayed to its batch's end."
    read_seconds: float = 0.0
    tokenize_seconds: float = 0.0
    generate_seconds: float = 0.0
    write_seconds: float = 0.0
    "To encode and to write, the last waiting for the disk included."
    read_wait_seconds: float = 0.0
    "In which nothing was generated since rows were not yet read and tokenized."
    write_wait_seconds: float = 0.0
    "In which nothing was generated since answers were not yet written."

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def record(self) -> dict[str, object]:
        """The counts by name, for JSON."""
        named: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = {name: dict(v) if isinstance(v, Counter) else v for name, v in named.items()}
        if not isfinite(self.loglikelihood):  # JSON has no word for minus infinity.
            plain["loglikelihood"] = None
        return plain | {"idle_share": self.idle_share}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Counts":
        """The counts that record() has written. Raises KeyError or TypeError if it has not.

        What earlier versions did not count may be absent.
        """
        named: dict[str, Any] = {}
        for f in fields(cls):
            if f.name in _LATER and f.name not in record:
                continue
            value = record[f.name]
            if f.name == "loglikelihood" and value is None:
                value = -inf
            if f.type in (int, float):
                named[f.name] = f.type(value)
            else:
                named[f.name] = Counter({str(key): int(number) for key, number in value.items()})
        return cls(**named)

    @property
    def failed_rows(self) -> int:
        """Rows with an error."""
        return sum(self.failed.values())

    @property
    def tokens(self) -> int:
        """Those by which speed is told: new ones, or all that a job which scores has run."""
        return self.prompt_tokens + self.scored_tokens if self.scored_tokens else self.new_tokens

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
    lessons: Lessons = field(default_factory=Lessons)
    "What the attempts before had taught."
    retryable: int = 0
    "Rows with an error that may pass when they are tried again."
    mended: tuple[int, ...] = ()
    "Rows that were answered later than the others, by row_id, and so in other batches."

    def record(self) -> dict[str, object]:
        """The report, for JSON."""
        return {
            "shard": [self.shard.index, self.shard.start, self.shard.stop],
            "part": asdict(self.part),
            "counts": self.counts.record(),
            "seconds": self.seconds,
            "lessons": asdict(self.lessons),
            "retryable": self.retryable,
            "mended": list(self.mended),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "ShardReport":
        """The report that record() has written. Raises KeyError or TypeError if it has not."""
        return cls(
            shard=Shard(*record["shard"]),
            part=Part(**record["part"]),
            counts=Counts.from_record(record["counts"]),
            seconds=record["seconds"],
            lessons=Lessons.from_record(record["lessons"]),
            retryable=record["retryable"],
            mended=tuple(record["mended"]),
        )
