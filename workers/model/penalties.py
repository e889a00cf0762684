"""Penalties on tokens that a row has seen or said: repetition, frequency and presence.

B rows in a batch, n of them in this step, V words in the vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from workers.pipeline import RowContext


class Penalties:
    """What a batch's rows have seen and said. Memory: 5 * B * V bytes."""

    def __init__(
        self, contexts: Sequence[RowContext], vocab_size: int, device: torch.device
    ) -> None:
        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        samplings = [context.sampling for context in contexts]
        self._repetition = column([s.repetition_penalty for s in samplings])
        self._frequency = column([s.frequency_penalty for s in samplings])
        self._presence = column([s.presence_penalty for s in samplings])
        shape = (len(contexts), vocab_size)
        self._is_seen = torch.zeros(shape, dtype=torch.bool, device=device)
        self._num_said = torch.zeros(shape, dtype=torch.float32, device=device)
        for row, context in enumerate(contexts):
            self._is_seen[row, list(context.token_ids)] = True

    def apply(self, z: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """[n, V]: repetition over prompt and answer, then frequency and presence over the answer.

        A repetition penalty divides what is above 0 and multiplies what is below, so that either
        becomes less likely.
        """
        places = torch.from_numpy(rows).to(z.device)
        repetition = self._repetition[places]
        is_seen, num_said = self._is_seen[places], self._num_said[places]
        z = torch.where(is_seen, torch.where(z > 0, z / repetition, z * repetition), z)
        return z - self._frequency[places] * num_said - self._presence[places] * (num_said > 0)

    def count(self, rows: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None:
        """Remembers the tokens just drawn."""
        places = torch.from_numpy(rows), torch.from_numpy(token_ids)
        self._is_seen[places] = True
        self._num_said[places] += 1
