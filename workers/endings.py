"""When rows end: which tokens end which row, and how long each may become."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jobs.sampling import RowSampling

_NONE = -1
"Fills up lists of ids. No token has it."


class Endings:
    """The rows of one batch. B rows, n of them asked about, S ids that end a row."""

    def __init__(
        self,
        samplings: Sequence[RowSampling],
        limits: Sequence[int],
        eos_token_ids: frozenset[int],
    ) -> None:
        """limits: most new tokens of each row."""
        ids = [
            [] if sampling.ignore_eos else sorted(eos_token_ids | sampling.stop_token_ids)
            for sampling in samplings
        ]
        width = max(map(len, ids), default=0)
        self._ids = np.full((len(ids), width), _NONE, np.int64)
        for row, ending in enumerate(ids):
            self._ids[row, : len(ending)] = ending
        self._limits = np.array(limits, np.int64)

    def stops(
        self, rows: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """[n], true where the row's new token ends it."""
        is_ending: npt.NDArray[np.bool_] = (self._ids[rows] == token_ids[:, None]).any(axis=1)
        return is_ending

    def is_full(
        self, rows: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """[n], true where a row has all the new tokens that it may have."""
        is_full: npt.NDArray[np.bool_] = num_tokens >= self._limits[rows]
        return is_full
