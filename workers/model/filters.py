"""Temperature, top_k, top_p and min_p, and the walk down the candidates to the drawn token.

B rows in a batch, n of them in this step, W candidates looked at.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from jobs.sampling import RowSampling

FloatRows: TypeAlias = npt.NDArray[np.float32]

_SMALL_VOCABULARY = 1024
"Sorted whole at once: finding the best few would cost as much."
_FIRST_CANDIDATES = 256
"Sorted first where the whole vocabulary is in play; a draw falls beyond them now and then."
_LEAST_TEMPERATURE = np.float32(1e-6)
"Below this a division would overflow; there is no difference to greedy by then."


class Filters:
    """Temperature, top_k, top_p and min_p of a batch's rows, and the walk to the drawn token."""

    def __init__(self, samplings: Sequence[RowSampling], vocab_size: int) -> None:
        temperature = np.array([s.temperature for s in samplings], np.float32)
        self.temperature = np.maximum(temperature, _LEAST_TEMPERATURE)
        top_k = np.array([min(s.top_k, vocab_size) for s in samplings], np.int64)
        self.is_open = top_k < 1
        "[B], true if every word of the vocabulary is a candidate."
        self._top_k = np.where(self.is_open, vocab_size, top_k)
        self._top_p = np.array([s.top_p for s in samplings], np.float32)
        self._min_p = np.array([s.min_p for s in samplings], np.float32)
        self._vocab_size = vocab_size

    def first_width(self, rows: npt.NDArray[np.int64]) -> int:
        """W, how many candidates to sort at first."""
        if self._vocab_size <= _SMALL_VOCABULARY:
            return self._vocab_size
        closed = self._top_k[rows][~self.is_open[rows]]
        return min(self._vocab_size, max(_FIRST_CANDIDATES, int(closed.max(initial=0))))

    def walk(
        self,
        weights: FloatRows,
        rows: npt.NDArray[np.int64],
        mass: FloatRows,
        numbers: FloatRows,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Goes down the candidates until the drawn share of the mass is used up.

        weights: [n, W], exp of logits over temperature, best first, the best being 1.
        mass: [n], sum over the vocabulary, for rows without top_k.
        numbers: [n], drawn from [0, 1).
        Returns the place among the candidates, and whether W candidates were enough to tell.

            weights   1.0   0.6   0.3   0.2   0.1
                      |---- top_p keeps ----|          the smallest prefix with that share
                      |-- min_p --|                    those not too far below the best
                      |-> number * mass of the kept ones, used up at the token that is drawn
        """
        width = weights.shape[1]
        is_whole = ~self.is_open[rows] | (width == self._vocab_size)
        top_k, top_p, min_p = self._top_k[rows], self._top_p[rows], self._min_p[rows]
        weights = np.where(np.arange(width) < top_k[:, None], weights, np.float32(0))
        # accumulate adds one after another in float32, which is what makes the bits agree.
        prefix = np.add.accumulate(weights, axis=1)
        mass = np.where(self.is_open[rows], mass, prefix[:, -1])

        kept = np.minimum(top_k, width)
        reaches = prefix >= (top_p * mass)[:, None]
        has_top_p, is_reached = top_p < 1, reaches.any(axis=1)
        kept = np.where(has_top_p & is_reached, reaches.argmax(axis=1) + 1, kept)
        has_min_p, num_near = min_p > 0, (weights >= min_p[:, None]).sum(axis=1)
        kept = np.where(has_min_p, np.minimum(kept, num_near), kept)
        # The walk may end with a crumb left over; it must not end at a word that has no weight.
        num_possible = (weights > 0).sum(axis=1)
        kept = np.minimum(kept, np.maximum(num_possible, 1))
        is_bounded = (
            is_whole
            | (num_possible < width)
            | (has_top_p & is_reached)
            | (has_min_p & (num_near < width))
        )

        share = prefix[np.arange(len(rows)), kept - 1] / mass
        share = np.where(has_top_p | has_min_p, share, np.float32(1))
        left = np.concatenate([(mass * share * numbers)[:, None], weights], axis=1)
        used_up = np.subtract.accumulate(left, axis=1)[:, 1:] <= 0
        is_found = used_up.any(axis=1)
        choice = np.where(is_found, used_up.argmax(axis=1), kept - 1)
        is_settled = is_bounded | (is_found & ~has_top_p & ~has_min_p)
        return np.minimum(choice, kept - 1), is_settled
