"""A transformers model driven ragged: prompts packed side by side, then one token a row a step."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from workers.model.attention import RaggedPass
from workers.model.kv_cache import KVCache, RowLength
from workers.model.shape import LayerShape
from workers.pipeline import RowContext


class RaggedForward:
    """A model at work on the rows of one batch. B rows, n live ones, V words."""

    def __init__(
        self,
        model: PreTrainedModel,
        contexts: Sequence[RowContext],
        shapes: dict[int, LayerShape],
        max_length: int,
    ) -> None:
        """Allocates keys and values for the rows, each as long as it may become."""
        self._model = model
        self._device = model.device
        self._prompts = [context.token_ids for context in contexts]
        lengths = [
            RowLength(
                row,
                len(context.token_ids),
                min(max_length, len(context.token_ids) + context.sampling.max_new_tokens),
            )
            for row, context in enumerate(contexts)
        ]
        self._cache = KVCache(lengths, shapes, self._device)
        self._last_ids = torch.zeros(len(contexts), dtype=torch.long, device=self._device)
        self._has_prefilled = False
        self.shapes = shapes

    def next_logits(self) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """The live rows [n] and their logits [n, V]."""
        rows = self._cache.rows
        logits = self._decode(rows) if self._has_prefilled else self._prefill(rows)
        self._has_prefilled = True
        return np.array(rows, np.int64), logits

    def append(self, rows: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None:
        """Takes the tokens that the next step runs."""
        self._last_ids[torch.from_numpy(rows)] = torch.from_numpy(token_ids).to(self._device)

    def release(self, row: int) -> None:
        """Frees a row's keys and values."""
        self._cache.release(row)

    def _prefill(self, rows: list[int]) -> torch.Tensor:
        prompts = [self._prompts[row] for row in rows]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        return self._run(
            torch.tensor([token_id for prompt in prompts for token_id in prompt]),
            torch.cat([torch.arange(len(prompt)) for prompt in prompts]),
            RaggedPass(self._cache, self.shapes, is_prefill=True),
            lengths.cumsum(0) - 1,
        )

    def _decode(self, rows: list[int]) -> torch.Tensor:
        blocks = self._cache.blocks
        positions = [length for block in blocks for length in block.lengths]
        logits = self._run(
            self._last_ids[torch.tensor(rows)],
            torch.tensor(positions),
            RaggedPass(self._cache, self.shapes, is_prefill=False),
            torch.arange(len(rows)),
        )
        for block in blocks:
            block.lengths = [length + 1 for length in block.lengths]
        return logits

    def _run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        ragged: RaggedPass,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """[n, V] at the places wanted: the head is not applied to the others."""
        logits: torch.Tensor = self._model(
            input_ids=token_ids[None].to(self._device),
            position_ids=positions[None].to(self._device),
            use_cache=False,
            logits_to_keep=wanted.to(self._device),
            ragged=ragged,
        ).logits
        return logits[0]
