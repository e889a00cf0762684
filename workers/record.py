"""What a batch yields, gathered in arrays while it runs.

B rows, T new tokens of a row, K alternatives, V words in the vocabulary.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from jobs.completion import Capture
from workers.pipeline import StepOutput

Number = TypeVar("Number", bound=np.generic)

_CHUNK_TOKENS = 64
"Rows up to this length are held in one piece, and handed on without a copy."


class BatchRecord:
    """Tokens, log-probabilities and logits of a batch's rows, as far as they have come."""

    def __init__(self, capture: Capture, limits: Sequence[int], vocab_size: int) -> None:
        """limits: most new tokens of each row."""
        self.capture = capture
        num_rows, width = len(limits), capture.logprobs or 0
        room = min(max(limits, default=0), _CHUNK_TOKENS)
        self._num_tokens = np.zeros(num_rows, np.int64)
        self._token_ids = np.empty((num_rows, room), np.int32)
        self._logprobs = np.empty((num_rows, room), np.float32)
        self._top_ids = _Chunks(limits, width, np.int32)
        self._top_logprobs = _Chunks(limits, width, np.float32)
        self._logits = _Chunks(limits, vocab_size, np.float32)

    def num_tokens(self, row: int) -> int:
        """New tokens of a row so far."""
        return int(self._num_tokens[row])

    def token_ids(self, row: int) -> npt.NDArray[np.int32]:
        """[T]"""
        return self._token_ids[row, : self._num_tokens[row]]

    def logprobs(self, row: int) -> npt.NDArray[np.float32]:
        """[T], nats."""
        return self._logprobs[row, : self._num_tokens[row]]

    def top_ids(self, row: int) -> npt.NDArray[np.int32]:
        """[T, K], most likely first."""
        return self._top_ids.read(row, self.num_tokens(row))

    def top_logprobs(self, row: int) -> npt.NDArray[np.float32]:
        """[T, K], nats, most likely first."""
        return self._top_logprobs.read(row, self.num_tokens(row))

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """[T, V], raw; not a copy."""
        return self._logits.read(row, self.num_tokens(row))

    def check(self, output: StepOutput) -> None:
        """Raises RuntimeError unless a step brought what is to be kept, one for each token."""
        capture = self.capture
        wanted: list[tuple[str, npt.NDArray[np.generic] | None]] = [("tokens", output.token_ids)]
        if capture.logprobs is not None:
            wanted.append(("log-probabilities", output.logprobs))
        if capture.logprobs:
            wanted += [("top ids", output.top_ids), ("top log-probabilities", output.top_logprobs)]
        if capture.logits:
            wanted.append(("rows of logits", output.logits))
        for name, array in wanted:
            count = 0 if array is None else len(array)
            if count != len(output.rows):
                raise RuntimeError(
                    f"the pipeline returned {count} {name} for {len(output.rows)} rows"
                )

    def lengths(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[n], new tokens of rows so far."""
        return self._num_tokens[rows]

    def append(self, output: StepOutput, places: npt.NDArray[np.int64]) -> None:
        """Keeps what a step brought for the rows that stand at these places in its arrays."""
        rows = output.rows[places]
        steps = self._num_tokens[rows]
        if steps.max(initial=-1) >= self._token_ids.shape[1]:
            self._token_ids, self._logprobs = _doubled(self._token_ids), _doubled(self._logprobs)
        self._token_ids[rows, steps] = output.token_ids[places]
        if self.capture.logprobs is not None and output.logprobs is not None:
            self._logprobs[rows, steps] = output.logprobs[places]
        if self.capture.logprobs and output.top_ids is not None and output.top_logprobs is not None:
            self._top_ids.append(rows, steps, output.top_ids, places)
            self._top_logprobs.append(rows, steps, output.top_logprobs, places)
        if self.capture.logits and output.logits is not None:
            self._logits.append(rows, steps, output.logits, places)
        self._num_tokens[rows] = steps + 1


class _Chunks(Generic[Number]):
    """A matrix a row that grows by chunks, so that hardly more memory is held than was filled."""

    def __init__(self, limits: Sequence[int], width: int, dtype: type[Number]) -> None:
        self._limits = limits
        self._width = width
        self._dtype = dtype
        self._chunks: list[list[npt.NDArray[Number]]] = [[] for _ in limits]
        self._starts = [0] * len(limits)
        "Where the last chunk of each row begins."

    def append(
        self,
        rows: npt.NDArray[np.int64],
        steps: npt.NDArray[np.int64],
        values: npt.NDArray[np.generic],
        places: npt.NDArray[np.int64],
    ) -> None:
        """Writes values[place] as the line of the row's matrix that has the step's number."""
        for row, step, place in zip(rows.tolist(), steps.tolist(), places.tolist(), strict=True):
            chunks = self._chunks[row]
            if not chunks or step == self._starts[row] + len(chunks[-1]):
                room = min(_CHUNK_TOKENS, self._limits[row] - step)
                chunks.append(np.empty((room, self._width), self._dtype))
                self._starts[row] = step
            chunks[-1][step - self._starts[row]] = values[place]

    def read(self, row: int, num_tokens: int) -> npt.NDArray[Number]:
        """[num_tokens, width]. Joins the row's chunks, which are held as one from then on."""
        chunks = self._chunks[row]
        if not chunks:
            return np.empty((num_tokens, self._width), self._dtype)
        if len(chunks) > 1:
            chunks[-1] = chunks[-1][: num_tokens - self._starts[row]]
            chunks[:] = [np.concatenate(chunks)]
            self._starts[row] = 0
        return chunks[0][:num_tokens]


def _doubled(array: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """The same numbers with twice the room along the second axis."""
    larger = np.empty((len(array), 2 * array.shape[1]), array.dtype)
    larger[:, : array.shape[1]] = array
    return larger
