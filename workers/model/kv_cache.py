"""Keys and values of a batch's rows, in pages of 16 tokens.

    row 0    page 0, 1, 4          a row has the pages that it has filled, and takes one more when
    row 1    page 0, 1, 2, 5       it grows; what rows begin with in common they share
    free     page 3, 6, 7 ...      the page that was freed last is taken first

Nothing is padded or moved, and a worker touches no more memory than its rows hold at once
(PagedAttention, Kwon et al. 2023).
Letters: P pages, H key-value heads, D and E numbers a key and a value, n rows.
"""

import math
import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from workers.model.shape import LayerShape

PAGE = 16
"Tokens of a page; kernels.c knows it too."


class Pages:
    """Memory for keys and values of every layer, page by page."""

    def __init__(self, num_pages: int, device: torch.device, *, are_passing: bool = False) -> None:
        """are_passing: no layer is asked again for what it has stored, so that one place is enough.

        Then each layer takes the place of the one before.
        """
        self.num_pages = num_pages
        self.device = device
        self._are_passing = are_passing
        self.layers: dict[int, torch.Tensor] = {}
        """[P, H, 16 * (D + E)] by layer: of each head its keys [D, 16], then its values [16, E].

        A key's numbers stand apart, so that sixteen scores are summed side by side.
        """

    def allocate(self, layer: int, shape: LayerShape) -> None:
        """Makes room for one layer, if there is none. Raises MemoryError."""
        size = (self.num_pages, shape.num_kv_heads, PAGE * (shape.key_dim + shape.value_dim))
        if layer in self.layers:
            return
        if self._are_passing:
            for pages in self.layers.values():
                if pages.shape == size and pages.dtype == shape.dtype:
                    self.layers[layer] = pages
                    return
        self.layers[layer] = untouched(size, shape.dtype, self.device)

    def keys(self, layer: int, key_dim: int) -> torch.Tensor:
        """[P, H, D, 16]"""
        mine = self.layers[layer][..., : PAGE * key_dim]
        return mine.view(*mine.shape[:2], key_dim, PAGE)

    def values(self, layer: int, key_dim: int) -> torch.Tensor:
        """[P, H, 16, E]"""
        mine = self.layers[layer][..., PAGE * key_dim :]
        return mine.view(*mine.shape[:2], PAGE, -1)


class PagePool:
    """Pages of batches that have ended, for the next one: what was touched is not asked anew."""

    def __init__(self, device: torch.device, *, are_passing: bool = False) -> None:
        self._device = device
        self._are_passing = are_passing
        self._idle: Pages | None = None

    def take(self, num_pages: int) -> Pages:
        """At least so many pages. What they hold is undefined."""
        idle, self._idle = self._idle, None
        if idle is not None and idle.num_pages >= num_pages:
            return idle
        return Pages(num_pages, self._device, are_passing=self._are_passing)

    def give_back(self, pages: Pages) -> None:
        """Keeps pages for the next batch; of two kinds the larger."""
        if self._idle is None or self._idle.num_pages < pages.num_pages:
            self._idle = pages


class KVCache:
    """Which pages the rows of one batch hold. Rows are named by their place in the batch."""

    def __init__(
        self, pool: PagePool, sizes: Sequence[int], num_tokens: int, num_live: int
    ) -> None:
        """Claims pages for num_live rows at a time that hold num_tokens together.

        sizes: tokens that each row may come to hold.
        """
        self.pages = pool.take(math.ceil(num_tokens / PAGE) + num_live)
        weakref.finalize(self, pool.give_back, self.pages)
        self.device = self.pages.device
        self.rows: list[int] = []
        "Live rows, in the order in which they came."
        self.written = np.zeros(len(sizes), np.int64)
        "Tokens of each row whose keys and values are stored."
        self.table = np.zeros((len(sizes), math.ceil(max(sizes) / PAGE)), np.int32)
        "Pages of each row, in the order of its tokens."
        self._num_held = np.zeros(len(sizes), np.int64)
        self._num_holders = np.zeros(self.pages.num_pages, np.int32)
        "Rows that hold each page."
        self._free = list(range(self.pages.num_pages))[::-1]

    def admit(
        self, row: int, num_tokens: int, sharer: int | None = None, num_shared: int = 0
    ) -> None:
        """Takes in a row with room for so many tokens.

        sharer: a row whose first num_shared tokens are this one's too; they must fill pages.
        """
        if sharer is not None:
            held = num_shared // PAGE
            self.table[row, :held] = self.table[sharer, :held]
            self._num_holders[self.table[row, :held]] += 1
            self._num_held[row], self.written[row] = held, num_shared
        self.rows.append(row)
        self.extend(row, num_tokens)

    def extend(self, row: int, num_tokens: int) -> None:
        """Takes pages, so that a row has room for so many tokens."""
        held, wanted = int(self._num_held[row]), math.ceil(num_tokens / PAGE)
        for place in range(held, wanted):
            self.table[row, place] = page = self._free.pop()
            self._num_holders[page] = 1
        self._num_held[row] = max(held, wanted)

    def make_room(self, rows: npt.NDArray[np.int64]) -> None:
        """For one token more of each row."""
        for row in rows[self.written[rows] == self._num_held[rows] * PAGE].tolist():
            self.extend(row, int(self.written[row]) + 1)

    def release(self, row: int) -> None:
        """Frees the pages that no other row holds."""
        self.rows.remove(row)
        pages = self.table[row, : self._num_held[row]]
        self._num_holders[pages] -= 1
        self._free += pages[self._num_holders[pages] == 0].tolist()[::-1]
        self._num_held[row] = 0

    def places(self, row: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The page and the place in it of tokens [start, stop) of a row."""
        tokens = torch.arange(start, stop)
        pages = torch.from_numpy(self.table[row].astype(np.int64))[tokens // PAGE]
        return pages.to(self.device), (tokens % PAGE).to(self.device)

    def store(
        self,
        layer: int,
        places: tuple[torch.Tensor, torch.Tensor],
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Puts key [H, n, D] and value [H, n, E] of n tokens where they belong."""
        pages, places_in_page = places
        self.pages.keys(layer, key.shape[2])[pages, :, :, places_in_page] = key.transpose(0, 1)
        self.pages.values(layer, key.shape[2])[pages, :, places_in_page] = value.transpose(0, 1)

    def gather(
        self, layer: int, key_dim: int, rows: npt.NDArray[np.int64], lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [n, H, L, D] and values [n, H, L, E], copied, and zero from each row's length on.

        Zeros, since what pages held before may be NaN, which would still poison a sum under a mask.
        """
        longest = int(lengths.max())
        table = self.table[rows, : math.ceil(longest / PAGE)].astype(np.int64)
        pages = torch.from_numpy(table).to(self.device)
        keys = self.pages.keys(layer, key_dim)[pages].permute(0, 2, 1, 4, 3).flatten(2, 3)
        values = self.pages.values(layer, key_dim)[pages].transpose(1, 2).flatten(2, 3)
        is_beyond = torch.arange(longest, device=self.device)[None] >= lengths[:, None]
        keys, values = keys[:, :, :longest], values[:, :, :longest]
        keys.masked_fill_(is_beyond[:, None, :, None], 0)
        values.masked_fill_(is_beyond[:, None, :, None], 0)
        return keys, values


def untouched(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor. On a CPU it takes memory only where it is written, and gives it back.

    Its pages are asked of the system itself, which an allocator would keep.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(size, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"not enough memory for {num_bytes:,} bytes of keys or values") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # A kernel without them.
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(size)
