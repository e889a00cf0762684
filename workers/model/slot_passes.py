"""Forward passes over a SlotCache: one token more of rows under way, or stretches of prompts.

All that a pass needs goes to the device in one copy. A decode pass reads nothing but tensors that
lie there already, so that it can be captured as a graph.

Letters: T tokens of a pass, n rows, G query heads a key-value head, H key-value heads, L tokens of
the longest row, C tokens of room, D numbers a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from workers.model.attention import RaggedError, attend, attend_causally, group_heads
from workers.model.flash import Flash
from workers.model.shape import AttentionSettings, LayerShape
from workers.model.slots import SlotCache


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens [start, stop) of a prompt, whose tokens before are already stored."""

    row: int
    "Place in the batch; -1 for what all prompts begin with."
    home: int
    "Where the row begins in the cache."
    prompt: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """How many they are."""
        return self.stop - self.start

    @property
    def is_end(self) -> bool:
        """True if the prompt's last token is among them, so that its logits are wanted."""
        return self.stop == len(self.prompt)

    def cut(self, num_tokens: int) -> tuple["Stretch", "Stretch"]:
        """The first tokens, and the others."""
        middle = self.start + num_tokens
        return replace(self, stop=middle), replace(self, start=middle)


class PromptPass:
    """Stretches of prompts side by side, in the order of their homes."""

    def __init__(
        self,
        stretches: Sequence[Stretch],
        cache: SlotCache,
        shapes: dict[int, LayerShape],
        flash: Flash | None,
    ) -> None:
        self.shapes = shapes
        self._stretches = stretches
        self._cache = cache
        self._flash = flash
        positions = [np.arange(s.start, s.stop) for s in stretches]
        lengths = np.array([s.num_tokens for s in stretches])
        query_ends = lengths.cumsum()
        query_bounds = np.stack([query_ends - lengths, query_ends], axis=1).ravel()
        key_bounds = np.array([(s.home, s.home + s.stop) for s in stretches]).ravel()
        pieces = [
            np.concatenate([s.prompt[s.start : s.stop] for s in stretches]),
            np.concatenate(positions),
            np.concatenate([p + s.home for p, s in zip(positions, stretches, strict=True)]),
            query_ends[[s.is_end for s in stretches]] - 1,
            np.concatenate([[0], query_bounds]),
            np.concatenate([[0], key_bounds]),
        ]
        sizes = [len(piece) for piece in pieces]
        sent = torch.split(to_device(np.concatenate(pieces).astype(np.int64), cache.device), sizes)
        self.token_ids, self.positions, self._places, self.ends = sent[:4]
        "Of each token [T]; and where the last tokens of rows stand among them."
        self._bounds = sent[4].int(), sent[5].int()
        # At least two: for one query a row, the kernel takes all rows to have one, gaps included.
        self._longest = max(2, int(lengths.max())), max(s.stop for s in stretches)

    def attend(
        self,
        layer: int,
        settings: AttentionSettings,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """query [G * H, T, D], key and value [H, T, D] -> [T, G * H, D]."""
        self._cache.allocate(layer, self.shapes[layer])
        keys, values = self._cache.store(layer, self._places, key, value)
        if self._flash is not None and Flash.runs(key, value, settings.softcap):
            return self._flash.attend_back(
                query.transpose(0, 1),
                keys,
                values,
                self._bounds,
                self._longest,
                scale=settings.scaling,
                window=settings.window,
            )
        pieces = []
        start = 0
        for stretch in self._stretches:
            piece = query[:, start : start + stretch.num_tokens]
            seen = slice(stretch.home, stretch.home + stretch.stop)
            attended = attend_causally(
                group_heads(piece, 0, key.shape[0]),
                keys[seen].transpose(0, 1),
                values[seen].transpose(0, 1),
                settings,
            )
            pieces.append(attended.flatten(0, 1).transpose(0, 1))
            start += stretch.num_tokens
        return torch.cat(pieces)


class DecodePass:
    """One token more of each of n rows, in the order of their homes."""

    def __init__(
        self,
        rows: torch.Tensor,
        cache: SlotCache,
        shapes: dict[int, LayerShape],
        flash: Flash | None,
        *,
        max_length: int,
        longest: int | None,
    ) -> None:
        """rows: [3, n] on the device: token ids, tokens that are stored, homes.

        longest: tokens of the longest row; None in a graph, which serves rows of any length.
        """
        self.token_ids, self.positions, self._homes = rows
        self.shapes = shapes
        self._cache = cache
        self._flash = flash
        self._max_length = max_length
        self._longest = longest
        self._places = self._homes + self.positions
        self._bounds: dict[tuple[int, int | None], tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self,
        layer: int,
        settings: AttentionSettings,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """query [G * H, n, D], key and value [H, n, D] -> [n, G * H, D]."""
        self._cache.allocate(layer, self.shapes[layer])
        keys, values = self._cache.store(layer, self._places, key, value)
        grouped = group_heads(query.transpose(0, 1), 1, key.shape[0])  # [n, H, G, D]
        if self._flash is not None and Flash.runs(key, value, settings.softcap):
            bounds = self._find_bounds(grouped.shape[2], settings.window)
            return self._flash.attend_all(
                grouped, keys, values, bounds, self._max_length, scale=settings.scaling
            )
        if self._longest is None:
            raise RaggedError("its attention needs to know the longest row")
        # Beyond its end a row reads its last token again, under a mask: what another row holds
        # there may be NaN.
        tokens = torch.arange(self._longest, device=keys.device)[None]
        places = self._homes[:, None] + torch.minimum(tokens, self.positions[:, None])
        attended = attend(
            grouped,
            keys[places].transpose(1, 2),
            values[places].transpose(1, 2),
            self._make_mask(tokens, settings.window).to(query.dtype),
            settings,
        )
        return attended.flatten(1, 2)

    def _make_mask(self, tokens: torch.Tensor, window: int | None) -> torch.Tensor:
        """[n, 1, 1, L] to be added to scores."""
        is_seen = tokens <= self.positions[:, None]
        if window is not None:
            is_seen &= tokens > self.positions[:, None] - window
        return torch.where(is_seen, 0.0, -torch.inf)[:, None, None]

    def _find_bounds(
        self, num_groups: int, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where rows begin and end, gaps between them included, computed once a pass."""
        if (num_groups, window) not in self._bounds:
            stops = self._places + 1
            starts = self._homes if window is None else torch.maximum(self._homes, stops - window)
            ends = torch.arange(1, len(stops) + 1, device=stops.device) * num_groups
            self._bounds[num_groups, window] = (
                _interleave(ends - num_groups, ends),
                _interleave(starts, stops),
            )
        return self._bounds[num_groups, window]


def to_device(numbers: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Copies without waiting: from pinned memory to a GPU."""
    tensor = torch.from_numpy(numbers)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _interleave(starts: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """[2 * n + 1], int32: 0, the first start, the first stop, the next start, ..."""
    bounds = torch.stack([starts, stops], dim=1).flatten()
    return torch.cat([torch.zeros_like(bounds[:1]), bounds]).int()
