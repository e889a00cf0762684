"""The seam that GenerateIterator steps: what a pipeline tells of itself, and what it does.

B rows in a batch, n of them live, K alternatives, V words in the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from jobs.completion import Capture
from jobs.errors import SettingError
from jobs.sampling import RowSampling, SamplingDefaults
from jobs.scoring import ScoreRequest
from workers.turns import Turns


class CacheFullError(RuntimeError):
    """The pipeline's cache has no room for another batch while those that are open stay open."""


@dataclass(frozen=True, slots=True)
class RowContext:
    """One row of a batch, with its own sampling, seed and stop ids.

    The word is the seed's; elsewhere in this house such a thing would be called a prompt.
    """

    token_ids: tuple[int, ...]
    sampling: RowSampling
    seed: int


@dataclass(frozen=True, slots=True)
class PipelineLimits:
    """What a pipeline was opened for."""

    max_batch_size: int
    "Rows that are open at a time."
    max_length: int
    "Tokens of a row, prompt and answer together."
    max_prefill_tokens: int
    "Tokens of all prompts of a batch, which run through one forward pass."

    def __post_init__(self) -> None:
        for field, least in (("max_batch_size", 1), ("max_length", 2), ("max_prefill_tokens", 1)):
            if getattr(self, field) < least:
                raise SettingError(f"{field} must be at least {least}, got {getattr(self, field)}.")


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one forward pass brought. Every array has one entry for each entry of rows."""

    rows: npt.NDArray[np.int64]
    "[n], places in the batch."
    token_ids: npt.NDArray[np.int64]
    "[n]"
    has_nan: npt.NDArray[np.bool_]
    "[n], true where the logits are no numbers, so that the token means nothing."
    logprobs: npt.NDArray[np.float32] | None = None
    "[n], nats."
    top_ids: npt.NDArray[np.int64] | None = None
    "[n, K]"
    top_logprobs: npt.NDArray[np.float32] | None = None
    "[n, K], nats."
    logits: npt.NDArray[np.float32] | None = None
    "[n, V], raw."


class ClaimedBatch(Protocol):
    """A batch whose rows own their places in the cache."""

    def execute(self) -> StepOutput:
        """Runs one forward pass over the rows not yet released, and draws a token for each."""

    def release(self, row: int) -> None:
        """Gives back what a row owns. It takes no further part."""


class BatchPipeline(Protocol):
    """A model that is ready to run batches."""

    @property
    def limits(self) -> PipelineLimits:
        """What the pipeline was opened for."""

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a row by the model's own rules."""

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Sampling values for what a caller leaves unset."""

    @property
    def is_text_generator(self) -> bool:
        """True if the model continues token ids with token ids."""

    @property
    def applies_penalties(self) -> bool:
        """True if repetition, frequency and presence penalties take effect."""

    @property
    def is_speculative(self) -> bool:
        """True if a step may yield several tokens of a row."""

    @property
    def overlap_active(self) -> bool:
        """True if execute() returns what the call before it computed."""

    @property
    def graph_capture_ready(self) -> bool:
        """True if steps replay captured device graphs."""

    @property
    def data_parallel_degree(self) -> int:
        """Replicas that share a batch."""

    @property
    def num_open_rows(self) -> int:
        """Rows that are claimed and not yet released, over all open batches."""

    def claim(
        self, contexts: Sequence[RowContext], capture: Capture, turns: Turns | None = None
    ) -> ClaimedBatch:
        """Claims cache for every row, or for none.

        turns: how many rows are live at a time. None: all.
        Raises CacheFullError if open batches leave no room, MemoryError if there is not enough.
        """


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The scores of a request's T tokens behind its context, with K alternatives each."""

    logprobs: npt.NDArray[np.float32]
    "[T], nats; NaN where the logits are no numbers."
    is_best: npt.NDArray[np.bool_]
    "[T], true where no other token has a higher logit, nor an equal one and a lower id."
    top_ids: npt.NDArray[np.int64]
    "[T, K], most likely first."
    top_logprobs: npt.NDArray[np.float32]
    "[T, K], nats."
    logits: npt.NDArray[np.float32]
    "[T, V], raw; [T, 0] where they were not asked for."

    @property
    def loglikelihood(self) -> float:
        """The sum of the log-probabilities, in nats."""
        return float(np.sum(self.logprobs, dtype=np.float64))

    @property
    def is_greedy(self) -> bool:
        """True if greedy decoding would write these tokens."""
        return bool(self.is_best.all())


@runtime_checkable
class ScoringPipeline(Protocol):
    """A model that is ready to score tokens."""

    @property
    def limits(self) -> PipelineLimits:
        """What the pipeline was opened for."""

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""

    def score(
        self, requests: Sequence[ScoreRequest], num_top: int, *, keeps_logits: bool = False
    ) -> list[TokenScores]:
        """Scores requests that are valid, in their order. num_top: K."""


class RowSlots:
    """Counts the open rows of a pipeline against its limit."""

    def __init__(self, max_rows: int) -> None:
        self.num_open = 0
        self._max_rows = max_rows

    def claim(self, num_rows: int) -> None:
        """Raises CacheFullError, and claims nothing, if there is no room for all."""
        if self.num_open + num_rows > self._max_rows:
            raise CacheFullError(
                f"{num_rows} rows do not fit beside the {self.num_open} that are open; the "
                f"pipeline holds {self._max_rows}. Close a batch first, or open the pipeline with "
                "a larger max_batch_size."
            )
        self.num_open += num_rows

    def release(self, num_rows: int = 1) -> None:
        """Gives back what claim took."""
        self.num_open -= num_rows
