"""A transformers model driven ragged: tokens of many rows side by side in one pass.

A row that is new brings its whole prompt, and then one token a step. What the prompts of a batch
begin with in common is run once, and its keys and values are copied to every row.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from workers.model.attention import RaggedPass
from workers.model.kernels import Kernels
from workers.model.kv_cache import KVBlock, KVCache, RowLength
from workers.model.shape import LayerShape
from workers.model.steps import (
    DecodeStep,
    PromptSpan,
    Step,
    common_length,
    cut_passes,
    ending_places,
)
from workers.pipeline import RowContext

_TOKENS_PER_PASS = {"cpu": 1024, "cuda": 16_384}
"""Prompts run through the layers in passes of so many tokens.

More would fill memory, not time: a processor's caches hold the activations of about a thousand.
"""
_LEAST_SHARED = 16
"Tokens that prompts must begin with in common to be worth a pass of their own."


class RaggedForward:
    """A model at work on the rows of one batch. B rows, n live ones, V words."""

    def __init__(
        self,
        model: PreTrainedModel,
        contexts: Sequence[RowContext],
        shapes: dict[int, LayerShape],
        max_length: int,
        *,
        max_live: int | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """Allocates keys and values, for each row as long as it may become.

        max_live: the rows take turns, and so many are live at a time. None: all are.
        kernels: attends without padding; None does it with PyTorch alone.
        """
        self._model = model
        self._kernels = kernels
        self._device = model.device
        self._tokens_per_pass = _TOKENS_PER_PASS[model.device.type]
        self._prompts = [context.token_ids for context in contexts]
        lengths = [
            RowLength(
                row,
                len(context.token_ids),
                min(max_length, len(context.token_ids) + context.sampling.max_new_tokens),
            )
            for row, context in enumerate(contexts)
        ]
        self._cache = KVCache(lengths, shapes, self._device, max_live=max_live)
        self._last_ids = torch.zeros(len(contexts), dtype=torch.long, device=self._device)
        self._num_shared = common_length(self._prompts)
        self._prefix: KVBlock | None = None
        self.shapes = shapes

    def admit(self, rows: Sequence[int]) -> None:
        """Takes in rows: the next step runs their prompts."""
        if self._num_shared >= _LEAST_SHARED and self._prefix is None:
            self._prefix = self._run_prefix()
        longest_first = sorted(rows, key=lambda row: (-len(self._prompts[row]), row))
        self._cache.admit(longest_first, self._prefix)

    def next_logits(self) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """The live rows [n] and their logits [n, V]."""
        rows: list[int] = []
        logits = []
        for steps in self._passes():
            rows += [row for step in steps for row in step.ending_rows]
            logits.append(self._run(steps))
        return np.array(rows, np.int64), torch.cat(logits) if len(logits) > 1 else logits[0]

    def best_ids(self) -> None:
        """The sampler looks for them itself."""

    def append(self, rows: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None:
        """Takes the tokens that the next step runs."""
        self._last_ids[torch.from_numpy(rows)] = torch.from_numpy(token_ids).to(self._device)

    def release(self, row: int) -> None:
        """Frees a row's keys and values."""
        self._cache.release(row)

    def _run_prefix(self) -> KVBlock:
        """Runs what all prompts begin with, as a row of its own."""
        block = KVBlock(1, self._num_shared, self._device)
        for layer, shape in self.shapes.items():
            block.allocate(layer, shape)
        block.admit([0], None)
        span = PromptSpan(block, 0, self._prompts[0], 0, self._num_shared)
        for steps in cut_passes([span], self._tokens_per_pass):
            self._run(steps)
        return block

    def _passes(self) -> Iterator[Sequence[Step]]:
        """One token of each row that is under way, then the prompts of those that are new."""
        decoding, spans = [], []
        for block in self._cache.blocks:
            prompts = [self._prompts[row] for row in block.rows]
            num_old = int((block.written >= [len(prompt) for prompt in prompts]).sum())
            if num_old:
                decoding.append(DecodeStep(block, self._last_ids[block.rows[:num_old]]))
            spans += [
                PromptSpan(
                    block, place, prompts[place], int(block.written[place]), len(prompts[place])
                )
                for place in range(num_old, len(prompts))
            ]
        if decoding:
            yield decoding
        yield from cut_passes(spans, self._tokens_per_pass)

    def _run(self, steps: Sequence[Step]) -> torch.Tensor:
        """[rows that are to go on, V]: the head is applied to no other places."""
        logits: torch.Tensor = self._model(
            input_ids=torch.cat([step.token_ids for step in steps])[None].to(self._device),
            position_ids=torch.cat([step.positions for step in steps])[None].to(self._device),
            use_cache=False,
            logits_to_keep=ending_places(steps).to(self._device),
            ragged=RaggedPass(steps, self.shapes, self._kernels),
        ).logits
        for step in steps:
            step.mark_written()
        return logits[0]
