"""What one forward pass runs: one token more of rows under way, or stretches of prompts.

decode    |row 4|row 1|row 0|row 3|             one token of each row
prompts   |row 4 . . . . . . |row 1 . . . . . | tokens of rows side by side
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from workers.model.kv_cache import KVCache


class DecodeStep:
    """One token more of each of n rows."""

    def __init__(
        self, cache: KVCache, rows: npt.NDArray[np.int64], token_ids: torch.Tensor
    ) -> None:
        """token_ids: [n]. The rows must have room."""
        self.cache = cache
        self.rows = rows
        self.token_ids = token_ids
        self.num_tokens = len(rows)
        self.ending_rows = rows.tolist()
        "Rows whose logits are wanted: all."
        self.written = torch.from_numpy(cache.written[rows]).to(cache.device)
        self.positions = self.written
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def mark_written(self) -> None:
        """Counts the tokens in, whose keys and values are now stored."""
        self.cache.written[self.rows] += 1

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """[n, 1, 1, L] to be added to scores; None if every row sees all of the longest."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window, dtype)
        return self._masks[window]

    def _make_mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        longest = int(self.written.max()) + 1
        if int(self.written.min()) + 1 == longest and (window is None or longest <= window):
            return None
        positions = torch.arange(longest, device=self.written.device)[None]
        is_seen = positions <= self.written[:, None]
        if window is not None:
            is_seen &= positions > self.written[:, None] - window
        return torch.where(is_seen, 0.0, -torch.inf).to(dtype)[:, None, None]


class PromptSpan:
    """Tokens [start, stop) of a prompt, whose tokens before are already stored."""

    def __init__(
        self, cache: KVCache, row: int, prompt: Sequence[int], start: int, stop: int
    ) -> None:
        self.cache = cache
        self.row = row
        self.prompt = prompt
        self.start = start
        self.stop = stop
        self.num_tokens = stop - start
        self.ending_rows = [row] if stop == len(prompt) else []
        "The row, if this is the end of its prompt, whose logits are wanted."

    @property
    def token_ids(self) -> torch.Tensor:
        """[tokens]"""
        return torch.tensor(self.prompt[self.start : self.stop])

    @property
    def positions(self) -> torch.Tensor:
        """[tokens]"""
        return torch.arange(self.start, self.stop)

    def mark_written(self) -> None:
        """Counts the tokens in, whose keys and values are now stored."""
        self.cache.written[self.row] = self.stop

    def cut(self, num_tokens: int) -> tuple["PromptSpan", "PromptSpan"]:
        """The first tokens, and the others."""
        middle = self.start + num_tokens
        return (
            PromptSpan(self.cache, self.row, self.prompt, self.start, middle),
            PromptSpan(self.cache, self.row, self.prompt, middle, self.stop),
        )


Step: TypeAlias = DecodeStep | PromptSpan


def ending_places(steps: Sequence[Step]) -> torch.Tensor:
    """Where the last tokens of rows stand among all tokens of a pass."""
    places: list[int] = []
    start = 0
    for step in steps:
        if isinstance(step, DecodeStep):
            places += range(start, start + step.num_tokens)
        elif step.ending_rows:
            places.append(start + step.num_tokens - 1)
        start += step.num_tokens
    return torch.tensor(places, dtype=torch.long)


class Span(Protocol):
    """A stretch of tokens that run through the layers together."""

    @property
    def num_tokens(self) -> int:
        """How many they are."""

    def cut(self, num_tokens: int) -> tuple[Self, Self]:
        """The first tokens, and the others."""


AnySpan = TypeVar("AnySpan", bound=Span)


def cut_passes(spans: Sequence[AnySpan], num_tokens: int) -> Iterator[list[AnySpan]]:
    """Passes of at most num_tokens tokens. Only a prompt that is longer is cut."""
    taken: list[AnySpan] = []
    room = num_tokens
    for span in spans:
        if taken and span.num_tokens > room:
            yield taken
            taken, room = [], num_tokens
        while span.num_tokens > num_tokens:
            piece, span = span.cut(num_tokens)
            yield [piece]
        taken.append(span)
        room -= span.num_tokens
    if taken:
        yield taken


def common_length(prompts: Sequence[tuple[int, ...]]) -> int:
    """Tokens that all prompts begin with; each keeps one of its own. 0 for a prompt alone."""
    if len(prompts) < 2:
        return 0
    low, high = min(prompts), max(prompts)
    most = min(map(len, prompts)) - 1
    return next((n for n in range(most) if low[n] != high[n]), most)
