"""A claimed batch: a forward pass that yields logits, and a sampler that draws from them."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from jobs.completion import Capture
from workers.model.sampling import Sampler
from workers.pipeline import BatchPipeline, RowContext, RowSlots, StepOutput


class Forward(Protocol):
    """A model at work on the rows of one batch."""

    def next_logits(self) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """Runs the live rows one step further: which they are [n], and their logits [n, V]."""

    def append(self, rows: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None:
        """Takes the tokens that follow."""

    def release(self, row: int) -> None:
        """Frees what a row held."""


def claim_batch(
    pipeline: BatchPipeline,
    slots: RowSlots,
    contexts: Sequence[RowContext],
    capture: Capture,
    *,
    device: torch.device,
    make_forward: Callable[[], Forward],
) -> "SampledBatch":
    """Claims a place and what a forward pass needs for every row, or raises and holds nothing."""
    slots.claim(len(contexts))
    try:
        sampler = Sampler(
            contexts,
            capture,
            vocab_size=pipeline.vocab_size,
            eos_token_ids=pipeline.eos_token_ids,
            device=device,
        )
        return SampledBatch(make_forward(), sampler, slots)
    except BaseException:
        slots.release(len(contexts))
        raise


class SampledBatch:
    """One forward pass and one draw a step."""

    def __init__(self, forward: Forward, sampler: Sampler, slots: RowSlots) -> None:
        self._forward = forward
        self._sampler = sampler
        self._slots = slots

    def execute(self) -> StepOutput:
        """Runs one step over the live rows."""
        with torch.inference_mode():
            rows, logits = self._forward.next_logits()
            output = self._sampler.draw(logits, rows)
            self._forward.append(rows, output.token_ids)
        return output

    def release(self, row: int) -> None:
        """Frees what a row held; another batch may have its place."""
        self._forward.release(row)
        self._slots.release()
