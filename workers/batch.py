"""Pipelines made of a forward pass that yields logits, and a sampler that draws from them."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from jobs.completion import Capture
from jobs.model import ModelFacts
from jobs.scoring import ScoreRequest
from workers.model.kernels import Kernels
from workers.model.sampling import Sampler
from workers.pipeline import (
    PipelineLimits,
    RowContext,
    RowSlots,
    StepOutput,
    TokenScores,
)
from workers.turns import Queue, Turns


class Forward(Protocol):
    """A model at work on the rows of one batch."""

    def admit(self, rows: Sequence[int]) -> None:
        """Takes in rows: the next step runs their prompts."""

    def next_logits(self) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """Runs the live rows one step further: which they are [n], and their logits [n, V]."""

    def best_ids(self) -> torch.Tensor | None:
        """[n], the best id of each of these rows, -1 where their logits are no numbers.

        None: the forward pass does not look for it.
        """

    def append(self, rows: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None:
        """Takes the tokens that follow."""

    def release(self, row: int) -> None:
        """Frees what a row held."""


class SampledPipeline:
    """A BatchPipeline whose steps are a forward pass and a draw from its logits."""

    is_text_generator = True
    applies_penalties = True
    is_speculative = False
    overlap_active = False
    data_parallel_degree = 1

    def __init__(
        self,
        facts: ModelFacts,
        limits: PipelineLimits,
        *,
        device: torch.device,
        make_forward: Callable[[Sequence[RowContext], Turns | None], Forward],
        score: Callable[[Sequence[ScoreRequest], int, bool], list[TokenScores]],
        kernels: Kernels | None = None,
        capture_graphs: Callable[[], bool] | None = None,
    ) -> None:
        """make_forward: claims what a model needs for the rows of a batch, or raises.

        Its second argument says how many rows are live at a time; None means that all are.
        score: scores requests, with so many alternatives a token, and with logits or without.
        capture_graphs: captures steps as device graphs, if it can. None: there are none to capture.
        """
        self.graph_capture_ready = False
        self.limits = limits
        self.vocab_size = facts.vocab_size
        self.eos_token_ids = frozenset(facts.eos_token_ids)
        self.sampling_defaults = facts.defaults
        self._slots = RowSlots(limits.max_batch_size)
        self._device = device
        self._make_forward = make_forward
        self._score = score
        self._kernels = kernels
        self._capture_graphs = capture_graphs

    def warmup_graph_capture(self) -> None:
        """Captures steps as device graphs, where the model and the device allow it."""
        if self._capture_graphs is not None:
            self.graph_capture_ready = self._capture_graphs()

    def score(
        self, requests: Sequence[ScoreRequest], num_top: int, *, keeps_logits: bool = False
    ) -> list[TokenScores]:
        """Scores requests that are valid, in their order, with num_top alternatives a token."""
        return self._score(requests, num_top, keeps_logits)

    @property
    def num_open_rows(self) -> int:
        """Rows of open batches."""
        return self._slots.num_open

    def claim(
        self, contexts: Sequence[RowContext], capture: Capture, turns: Turns | None = None
    ) -> "SampledBatch":
        """Claims a place and the model's memory for every live row, or raises and holds nothing."""
        sizes = [
            min(self.limits.max_length, len(c.token_ids) + c.sampling.max_new_tokens)
            for c in contexts
        ]
        queue = Queue(sizes, turns or Turns(len(contexts), sum(sizes)))
        num_open = queue.num_open
        self._slots.claim(num_open)
        try:
            sampler = Sampler(
                contexts,
                capture,
                vocab_size=self.vocab_size,
                eos_token_ids=self.eos_token_ids,
                device=self._device,
                kernels=self._kernels,
            )
            forward = self._make_forward(contexts, turns)
            return SampledBatch(forward, sampler, queue, self._slots)
        except BaseException:
            self._slots.release(num_open)
            raise


class SampledBatch:
    """One forward pass and one draw a step."""

    def __init__(self, forward: Forward, sampler: Sampler, queue: Queue, slots: RowSlots) -> None:
        self._forward = forward
        self._sampler = sampler
        self._queue = queue
        self._slots = slots

    def execute(self) -> StepOutput:
        """Runs one step over the live rows."""
        with torch.inference_mode():
            if arriving := self._queue.arrivals():
                self._forward.admit(arriving)
            rows, logits = self._forward.next_logits()
            output = self._sampler.draw(logits, rows, self._forward.best_ids())
            self._forward.append(rows, output.token_ids)
        return output

    def release(self, row: int) -> None:
        """Frees what a row held; another may have its place."""
        num_open = self._queue.num_open
        if self._queue.leave(row):
            self._forward.release(row)
        self._slots.release(num_open - self._queue.num_open)
