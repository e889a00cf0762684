"""A transformers model driven on a GPU: one static cache, decode steps captured as graphs.

It does what RaggedForward does, with other means: keys and values lie in a SlotCache that all
batches of a pipeline share, rows attend to them by flash attention, and a decode step is one copy,
one graph, and one read. On a CPU it runs too, step by step, so that tests can see it.
"""

import weakref
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from workers.model.attention import Pass
from workers.model.flash import Flash
from workers.model.graphs import DecodeGraphs
from workers.model.shape import LayerShape
from workers.model.slot_passes import DecodePass, PromptPass, Stretch, to_device
from workers.model.slots import SlotCache
from workers.model.steps import common_length, cut_passes
from workers.pipeline import RowContext
from workers.turns import Turns

_TOKENS_PER_PASS = 16_384
"Prompts run through the layers in passes of so many tokens. More would fill memory, not time."
_LEAST_SHARED = 16
"Tokens that prompts must begin with in common to be worth a pass of their own."


class SlottedModel:
    """A model and the cache that all its batches share. V words in the vocabulary."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: SlotCache,
        flash: Flash | None,
        shapes: dict[int, LayerShape],
        *,
        max_length: int,
        max_rows: int,
    ) -> None:
        """max_rows: most rows of a decode step. The cache must have a pad for each."""
        self.cache = cache
        self.shapes = shapes
        self.max_length = max_length
        self._model = model
        self._flash = flash
        for layer, shape in shapes.items():
            cache.allocate(layer, shape)
        self._graphs = DecodeGraphs(self._run_decode, max_rows, cache.pads_start, cache.device)

    def capture_graphs(self) -> bool:
        """Captures decode steps. False, and a word in the log, if that cannot be done."""
        with torch.inference_mode():
            return self._graphs.capture()

    def decode(self, rows: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs rows [3, n] of ids, stored tokens and homes: logits [n, V] and best ids [n]."""
        if self._graphs.is_ready:
            return self._graphs.replay(rows)
        return self._run_decode(to_device(rows, self.cache.device), int(rows[1].max()) + 1)

    def prefill(self, stretches: Sequence[Stretch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [m, V] and best ids [m] of the stretches that end their prompts."""
        prompts = PromptPass(stretches, self.cache, self.shapes, self._flash)
        return self._run(prompts, prompts.token_ids, prompts.positions, prompts.ends)

    def _run_decode(
        self, rows: torch.Tensor, longest: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = DecodePass(
            rows,
            self.cache,
            self.shapes,
            self._flash,
            max_length=self.max_length,
            longest=longest,
        )
        return self._run(step, step.token_ids, step.positions, 0)

    def _run(
        self,
        step: Pass,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        ends: torch.Tensor | int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """ends: places of the tokens whose logits are wanted, or 0 for all."""
        logits: torch.Tensor = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=ends,
            ragged=step,
        ).logits[0]
        return logits, find_best(logits)


class SlottedForward:
    """A model at work on the rows of one batch. B rows, n live ones."""

    def __init__(
        self,
        slotted: SlottedModel,
        contexts: Sequence[RowContext],
        *,
        turns: Turns | None = None,
    ) -> None:
        """Claims room in the cache, for each row as long as it may become.

        turns: so many rows are live at a time. None: all are.
        """
        self._slotted = slotted
        self._prompts = [context.token_ids for context in contexts]
        self._num_prompt_tokens = np.array([len(prompt) for prompt in self._prompts])
        sizes = [
            min(slotted.max_length, len(c.token_ids) + c.sampling.max_new_tokens) for c in contexts
        ]
        shared = common_length(self._prompts)
        self._num_shared = shared if shared >= _LEAST_SHARED else 0
        rooms = sizes if turns is None else [max(sizes)] * min(turns.max_live, len(sizes))
        start = slotted.cache.claim(self._num_shared + sum(rooms))
        self._give_back = weakref.finalize(self, slotted.cache.release, start)
        self._prefix_home = start
        homes = start + self._num_shared + np.cumsum([0, *rooms[:-1]])
        self._free: list[int] | None = None if turns is None else homes.tolist()
        "Homes that nobody has, where rows take turns."
        self._homes = np.zeros(len(sizes), np.int64) if turns is not None else homes
        self._order = np.zeros(0, np.int64)
        "The live rows, by their homes."
        self._written = np.zeros(len(sizes), np.int64)
        self._last_ids = np.zeros(len(sizes), np.int64)
        self._num_left = len(sizes)
        self._has_prefix = False
        self._best: torch.Tensor | None = None

    def admit(self, rows: Sequence[int]) -> None:
        """Takes in rows: the next step runs their prompts."""
        if self._free is not None:
            heapify(self._free)
            for row in rows:
                self._homes[row] = heappop(self._free)
        if self._num_shared:
            if not self._has_prefix:
                self._run_prompts([-1])
                self._has_prefix = True
            targets = self._homes[list(rows)].tolist()
            self._slotted.cache.repeat(self._prefix_home, self._num_shared, targets)
        self._written[list(rows)] = self._num_shared
        live = np.concatenate([self._order, np.array(rows, np.int64)])
        self._order = live[np.argsort(self._homes[live])]

    def next_logits(self) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """The live rows [n] and their logits [n, V]."""
        order = self._order
        is_old = self._written[order] >= self._num_prompt_tokens[order]
        old, new = order[is_old], order[~is_old]
        results = []
        if len(old):
            rows = np.stack([self._last_ids[old], self._written[old], self._homes[old]])
            results.append(self._slotted.decode(rows))
            self._written[old] += 1
        if len(new):
            results += self._run_prompts(new.tolist())
        logits, best = zip(*results, strict=True)
        self._best = torch.cat(best) if len(best) > 1 else best[0]
        return np.concatenate([old, new]), torch.cat(logits) if len(logits) > 1 else logits[0]

    @property
    def shapes(self) -> dict[int, LayerShape]:
        """Of the layers that were met, by layer."""
        return self._slotted.shapes

    def best_ids(self) -> torch.Tensor | None:
        """Of the rows just run [n], the best id of each; -1 where the logits are no numbers."""
        return self._best

    def append(self, rows: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None:
        """Takes the tokens that the next step runs."""
        self._last_ids[rows] = token_ids

    def release(self, row: int) -> None:
        """Frees a row; the last one gives back the batch's room."""
        self._order = self._order[self._order != row]
        if self._free is not None:
            heappush(self._free, int(self._homes[row]))
        self._num_left -= 1
        if not self._num_left:
            self._give_back()

    def _run_prompts(self, rows: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Runs what is left of the rows' prompts; -1 is what all begin with."""
        stretches = [
            Stretch(-1, self._prefix_home, self._prompts[0], 0, self._num_shared)
            if row < 0
            else Stretch(
                row,
                int(self._homes[row]),
                self._prompts[row],
                int(self._written[row]),
                len(self._prompts[row]),
            )
            for row in rows
        ]
        results = []
        for taken in cut_passes(stretches, _TOKENS_PER_PASS):
            results.append(self._slotted.prefill(taken))
            for stretch in taken:
                if stretch.row >= 0:
                    self._written[stretch.row] = stretch.stop
        return results


def find_best(logits: torch.Tensor) -> torch.Tensor:
    """[n], the lowest id with the best logit of each row; -1 where the best is no number."""
    peak, best = logits.max(dim=1)  # Of equal logits, max takes the first.
    return best.masked_fill(~peak.isfinite(), -1)
