"""What a batch yields, gathered in arrays while it runs.

B rows, C tokens of room, K alternatives, V words in the vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jobs.completion import Capture
from workers.pipeline import StepOutput

_FIRST_TOKENS = 64
_FIRST_BYTES = 2**30
"Room is made for all tokens at once up to this size; beyond it, room grows as it is needed."


class BatchRecord:
    """Tokens, log-probabilities and logits of a batch's rows, as far as they have come."""

    def __init__(self, capture: Capture, limits: Sequence[int], vocab_size: int) -> None:
        self.capture = capture
        num_rows, longest = len(limits), max(limits, default=0)
        width = capture.logprobs or 0
        bytes_per_token = num_rows * (8 + 8 * width + 4 * vocab_size * capture.logits)
        fits = _FIRST_BYTES // bytes_per_token if bytes_per_token else longest
        room = min(longest, max(_FIRST_TOKENS, fits))
        # np.empty takes address space, and memory only where it is written.
        self._num_tokens = np.zeros(num_rows, np.int64)
        self._token_ids = np.empty((num_rows, room), np.int32)
        has_logprobs = capture.logprobs is not None
        self._logprobs = np.empty((num_rows, room if has_logprobs else 0), np.float32)
        self._top_ids = np.empty((num_rows, room if has_logprobs else 0, width), np.int32)
        self._top_logprobs = np.empty((num_rows, room if has_logprobs else 0, width), np.float32)
        self._logits = np.empty((num_rows, room if capture.logits else 0, vocab_size), np.float32)

    def num_tokens(self, row: int) -> int:
        """New tokens of a row so far."""
        return int(self._num_tokens[row])

    def token_ids(self, row: int) -> npt.NDArray[np.int32]:
        """[T]"""
        return self._token_ids[row, : self._num_tokens[row]]

    def logprobs(self, row: int) -> npt.NDArray[np.float32]:
        """[T], nats."""
        return self._logprobs[row, : self._num_tokens[row]]

    def top(self, row: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Ids and log-probabilities of the alternatives, both [T, K], most likely first."""
        stop = self._num_tokens[row]
        return self._top_ids[row, :stop], self._top_logprobs[row, :stop]

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """[T, V], raw; a view, not a copy."""
        return self._logits[row, : self._num_tokens[row]]

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

    def append(self, output: StepOutput, places: Sequence[int]) -> None:
        """Keeps what a step brought for the rows that stand at these places in its arrays."""
        rows = output.rows[places]
        steps = self._num_tokens[rows]
        if steps.max(initial=-1) >= self._token_ids.shape[1]:
            self._grow()
        self._token_ids[rows, steps] = output.token_ids[places]
        if self.capture.logprobs is not None and output.logprobs is not None:
            self._logprobs[rows, steps] = output.logprobs[places]
        if self.capture.logprobs and output.top_ids is not None and output.top_logprobs is not None:
            self._top_ids[rows, steps] = output.top_ids[places]
            self._top_logprobs[rows, steps] = output.top_logprobs[places]
        if self.capture.logits and output.logits is not None:
            for row, step, place in zip(
                rows, steps, places, strict=True
            ):  # Copied once, not twice.
                self._logits[row, step] = output.logits[place]
        self._num_tokens[rows] = steps + 1

    def _grow(self) -> None:
        """Doubles the room for tokens."""
        for name in ("_token_ids", "_logprobs", "_top_ids", "_top_logprobs", "_logits"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.empty_like(old)], axis=1))
