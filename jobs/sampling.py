"""What sampling values may be, where unset ones come from, and the seed of each row."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from operator import index
from typing import Any, Literal, SupportsFloat, SupportsIndex

MASK_64 = 2**64 - 1

Origin = Literal["asked", "model", "neutral"]
"""Who chose a sampling value: the caller, the model's generation config, or nobody."""

# Checked in this order, which is the seed's: the first value out of range is the one named.
RANGES: dict[str, tuple[float, float]] = {
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, math.inf),
    "top_k": (-1, math.inf),
    "top_p": (0.0, 1.0),
    "temperature": (0.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "min_new_tokens": (0, math.inf),
}
_COUNTS = {"top_k", "min_new_tokens"}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn, as asked for. None leaves it to the model's generation config."""

    max_new_tokens: int
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0


NOTHING_DRAWN = Sampling(max_new_tokens=1)
"For a job that scores."


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a model's generation config says of sampling. None: it says nothing."""

    min_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row's tokens are drawn, with every value settled."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    "-1 keeps the whole vocabulary."
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()

    def record(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return asdict(self) | {"stop_token_ids": sorted(self.stop_token_ids)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "RowSampling":
        """The sampling that record() has written, whatever else is there. Raises KeyError."""
        named = {f.name: record[f.name] for f in fields(cls)}
        return cls(**named | {"stop_token_ids": frozenset(record["stop_token_ids"])})

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken, so that no number is drawn."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """True if earlier tokens change the logits of later ones."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


def check_sampling(sampling: "Sampling | RowSampling") -> None:
    """Checks each value against its range, in the seed's order.

    Raises TypeError for a value that is no number of the right kind, ValueError for one out of
    range.
    """
    check_max_new_tokens(sampling.max_new_tokens)
    for name in RANGES:
        value = getattr(sampling, name)
        if value is not None:
            _check_value(name, value)
    check_stop_token_ids(sampling.stop_token_ids)
    if isinstance(sampling, Sampling):
        as_integer("seed", sampling.seed)


def check_stop_token_ids(token_ids: Iterable[object]) -> None:
    """Raises TypeError unless all are integers."""
    for token_id in token_ids:
        as_integer("stop_token_ids", token_id)


def check_min_against_max(sampling: RowSampling) -> None:
    """Raises ValueError if a row would have to be longer than it may be."""
    low, high = sampling.min_new_tokens, sampling.max_new_tokens
    if low > high:
        raise ValueError(f"min_new_tokens is {low}, more than max_new_tokens, which is {high}")


def check_max_new_tokens(value: object) -> None:
    """Raises TypeError for what is no integer, ValueError for a boolean or less than 1."""
    if _as_count("max_new_tokens", value) < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {value!r}")


def as_integer(name: str, value: object) -> int:
    """Returns value as an int, from anything with __index__; raises TypeError otherwise."""
    if isinstance(value, SupportsIndex):
        return index(value)
    raise TypeError(f"{name} must be an integer, got {value!r}")


def _as_count(name: str, value: object) -> int:
    if isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    return as_integer(name, value)


def _check_value(name: str, value: object) -> None:
    number: float
    if name in _COUNTS:
        number = _as_count(name, value)
    elif isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise TypeError(f"{name} must be a number, got {value!r}")
    else:
        number = float(value)
    low, high = RANGES[name]
    is_inside = low <= number <= high and math.isfinite(number)
    if not is_inside or (name == "repetition_penalty" and number == 0):
        raise ValueError(f"{name} must be {range_words(name)}, got {value!r}")


def range_words(name: str) -> str:
    """What a sampling value may be, in words."""
    low, high = RANGES[name]
    words = {
        "repetition_penalty": "finite and above 0",
        "top_k": "at least 1, or -1 or 0 for off",
        "min_new_tokens": "at least 0",
    }
    return words.get(name, f"between {low:g} and {high:g}")


def resolve_sampling(
    sampling: Sampling, defaults: SamplingDefaults
) -> tuple[RowSampling, dict[str, Origin]]:
    """Settles every value: the one asked for, else the model's, else one that changes nothing.

    Returns the values and, by name, who chose each.
    """
    origins: dict[str, Origin] = {}

    def settle(name: str, neutral: float) -> float:
        asked, model = getattr(sampling, name), getattr(defaults, name, None)
        origins[name] = (
            "asked" if asked is not None else "model" if model is not None else "neutral"
        )
        return float(asked if asked is not None else model if model is not None else neutral)

    settled = RowSampling(
        max_new_tokens=index(sampling.max_new_tokens),
        min_new_tokens=int(settle("min_new_tokens", 0)),
        temperature=settle("temperature", 1.0),
        top_k=int(settle("top_k", -1)) or -1,
        top_p=settle("top_p", 1.0),
        min_p=settle("min_p", 0.0),
        frequency_penalty=settle("frequency_penalty", 0.0),
        presence_penalty=settle("presence_penalty", 0.0),
        repetition_penalty=settle("repetition_penalty", 1.0),
        ignore_eos=bool(sampling.ignore_eos),
        stop_token_ids=frozenset(index(token_id) for token_id in sampling.stop_token_ids),
    )
    try:
        check_sampling(settled)
    except ValueError as error:  # What was asked has been checked before.
        raise ValueError(
            f"the model's generation config: {error}. Give a value of yours"
        ) from error
    return settled, origins


def row_seed(job_seed: int, row_id: int) -> int:
    """The seed of a row of a job: any worker that meets the row draws the same tokens.

    Draws are keyed by seed plus length, so seeds that lie close together share numbers. Rows are
    therefore 2**32 apart, and the job's own seed is scattered first, so that jobs with seeds S and
    S + 1 have nothing in common.
    """
    return (scatter(job_seed) + (row_id << 32)) & MASK_64


def scatter(value: int) -> int:
    """Maps a 64-bit number to one far away, one to one. splitmix64; Steele, Lea and Flood 2014."""
    mixed = (value + 0x9E3779B97F4A7C15) & MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK_64
    return mixed ^ (mixed >> 31)
