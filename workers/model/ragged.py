"""A transformers model driven ragged: tokens of many rows side by side in one pass.

A row that is new brings its whole prompt, and then one token a step. What the prompts of a batch
begin with in common is run once, and all rows read its keys and values where they are.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from workers.model.attention import RaggedPass
from workers.model.kernels import Kernels
from workers.model.kv_cache import PAGE, KVCache, PagePool
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
from workers.turns import Turns

_TOKENS_PER_PASS = 1024
"""Prompts run through the layers in passes of so many tokens.

More would fill memory, not time: a processor's caches hold the activations of about a thousand.
"""
_LEAST_SHARED = PAGE
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
        turns: Turns | None = None,
        kernels: Kernels | None = None,
        pool: PagePool | None = None,
    ) -> None:
        """Claims room for keys and values, or raises and leaves nothing behind.

        turns: so many rows are live at a time. None: all are.
        kernels: attends without padding; None does it with PyTorch alone.
        pool: where the room comes from; None for a new one.
        """
        self._model = model
        self._kernels = kernels
        self._device = model.device
        self._prompts = [context.token_ids for context in contexts]
        sizes = [
            min(max_length, len(context.token_ids) + context.sampling.max_new_tokens)
            for context in contexts
        ]
        num_tokens, num_live = sum(sizes), len(sizes)
        if turns is not None:
            num_tokens = min(num_tokens, max(turns.max_tokens, *sizes))
            num_live = min(num_live, turns.max_live)
        common = common_length(self._prompts)
        num_shared = common // PAGE * PAGE if common >= _LEAST_SHARED else 0
        self._prefix = self._prompts[0][:num_shared]
        # What prompts begin with is a row of its own, behind the others.
        self._prefix_row = len(sizes)
        self._cache = KVCache(
            pool or PagePool(model.device),
            [*sizes, num_shared],
            num_tokens=num_tokens + num_shared,
            num_live=num_live + 1,
        )
        for layer, shape in shapes.items():
            self._cache.pages.allocate(layer, shape)
        self._last_ids = torch.zeros(len(contexts), dtype=torch.long, device=self._device)
        self._num_prompt_tokens = np.array([len(prompt) for prompt in self._prompts])
        self.shapes = shapes

    def admit(self, rows: Sequence[int]) -> None:
        """Takes in rows: the next step runs their prompts."""
        if self._prefix and not self._cache.written[self._prefix_row]:
            self._run_prefix()
        for row in sorted(rows, key=lambda row: (-len(self._prompts[row]), row)):
            prefix = self._prefix_row if self._prefix else None
            self._cache.admit(row, len(self._prompts[row]), prefix, len(self._prefix))

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

    def _run_prefix(self) -> None:
        cache, row, length = self._cache, self._prefix_row, len(self._prefix)
        cache.admit(row, length)
        for steps in cut_passes(
            [PromptSpan(cache, row, self._prefix, 0, length)], _TOKENS_PER_PASS
        ):
            self._run(steps)
        cache.rows.remove(row)  # It keeps its pages, and never takes a step.

    def _passes(self) -> Iterator[Sequence[Step]]:
        """One token of each row that is under way, then the prompts of those that are new."""
        cache = self._cache
        live = np.array(cache.rows, np.int64)
        is_old = cache.written[live] >= self._num_prompt_tokens[live]
        old, new = live[is_old], live[~is_old]
        if len(old):
            cache.make_room(old)
            yield [DecodeStep(cache, old, self._last_ids[torch.from_numpy(old)])]
        spans = [
            PromptSpan(cache, row, prompt, int(cache.written[row]), len(prompt))
            for row, prompt in ((row, self._prompts[row]) for row in new.tolist())
        ]
        yield from cut_passes(spans, _TOKENS_PER_PASS)

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
