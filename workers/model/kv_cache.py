"""Keys and values of a batch's rows, allocated once, without padding to the longest row.

Rows of like length share a block, so that one attention call can serve all of them:

    block 0   row 4  |############........|      # written   . room for the answer
              row 1  |###########.........|
    block 1   row 0  |####........|
              row 3  |###.........|
              row 2  |##..........|

Live rows stand at the front of their block: when one ends, the last takes its place. A batch whose
rows take turns has one block, in which a row that ends makes room for one that waits.
Letters: H key-value heads, C tokens of room, D numbers a head, n live rows of a block.
"""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.model.shape import LayerShape

_WASTE = 1.25
_SLACK = 16
"A row shares a block with rows up to _WASTE times as long, and _SLACK tokens more."


@dataclass(frozen=True, slots=True)
class RowLength:
    """How long a row is, and may become."""

    row: int
    prompt: int
    most: int


class KVBlock:
    """Places for rows of like length, with one tensor of keys and one of values a layer."""

    def __init__(
        self, places: int, room: int, device: torch.device, *, is_tight: bool = False
    ) -> None:
        """is_tight: nearly all of the room will be used."""
        self.is_tight = is_tight
        self.rows: list[int] = []
        "Places in the batch of the live rows, in the order in which they stand here."
        self.places = places
        self.room = room
        self.device = device
        self.keys: dict[int, torch.Tensor] = {}
        "[places, H, C, D] by layer."
        self.values: dict[int, torch.Tensor] = {}
        self._written = np.zeros(places, np.int64)

    @property
    def written(self) -> npt.NDArray[np.int64]:
        """[n], tokens whose keys and values are stored. Writable."""
        return self._written[: len(self.rows)]

    def allocate(self, layer: int, shape: LayerShape) -> None:
        """Makes room for one layer. Zeros, since a masked NaN would still poison a sum."""
        for tensors, width in ((self.keys, shape.key_dim), (self.values, shape.value_dim)):
            size = (self.places, shape.num_kv_heads, self.room, width)
            tensors[layer] = zeros(size, shape.dtype, self.device, is_tight=self.is_tight)

    def admit(self, rows: Sequence[int], prefix: "KVBlock | None") -> None:
        """Takes in rows, behind those that are there, that begin with the prefix's tokens."""
        start, stop = len(self.rows), len(self.rows) + len(rows)
        assert stop <= self.places, f"{stop} rows in a block of {self.places}"
        length = 0 if prefix is None else int(prefix.written[0])
        if prefix is not None:
            for mine, given in ((self.keys, prefix.keys), (self.values, prefix.values)):
                for layer, tensor in given.items():
                    mine[layer][start:stop, :, :length] = tensor[0, :, :length]
        self.rows += rows
        self.written[start:] = length

    def release(self, row: int) -> None:
        """Lets the last live row take the place of one that has ended."""
        place, last = self.rows.index(row), len(self.rows) - 1
        ended, moved = self.written[place], self.written[last] if place != last else 0
        for tensors in (self.keys, self.values):
            for tensor in tensors.values():
                tensor[place, :, :moved] = tensor[last, :, :moved]
                # What the ended row left may be NaN, and would lie under the mask of another.
                tensor[place, :, moved:ended] = 0
        self.rows[place], self.written[place] = self.rows[last], moved
        del self.rows[last]


class KVCache:
    """The blocks of one batch."""

    def __init__(
        self,
        lengths: Sequence[RowLength],
        shapes: dict[int, LayerShape],
        device: torch.device,
        *,
        max_live: int | None = None,
    ) -> None:
        """Allocates every place of every layer, or raises and leaves nothing behind.

        max_live: the rows take turns, and so many are live at a time. None: all are.
        """
        if max_live is None:
            groups = group_by_length(lengths)
            self._home = {length.row: n for n, group in enumerate(groups) for length in group}
            sizes = [(len(group), max(length.most for length in group)) for group in groups]
        else:
            self._home = dict.fromkeys((length.row for length in lengths), 0)
            sizes = [(max_live, max(length.most for length in lengths))]
        self._blocks = [
            KVBlock(places, room, device, is_tight=max_live is None) for places, room in sizes
        ]
        for block in self._blocks:
            for layer, shape in shapes.items():
                block.allocate(layer, shape)

    @property
    def blocks(self) -> list[KVBlock]:
        """Blocks with live rows, longest first."""
        return [block for block in self._blocks if block.rows]

    @property
    def rows(self) -> list[int]:
        """Places in the batch of all live rows, in the order in which they stand."""
        return [row for block in self.blocks for row in block.rows]

    def admit(self, rows: Sequence[int], prefix: KVBlock | None = None) -> None:
        """Takes in rows that begin with the prefix's tokens, as far as there are any."""
        for number, block in enumerate(self._blocks):
            if arriving := [row for row in rows if self._home[row] == number]:
                block.admit(arriving, prefix)

    def release(self, row: int) -> None:
        """Frees a row; the last row of a block frees its memory, unless others wait for it."""
        block = self._blocks[self._home.pop(row)]
        block.release(row)
        if not block.rows and block not in map(self._blocks.__getitem__, self._home.values()):
            block.keys.clear()
            block.values.clear()


def zeros(
    size: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, is_tight: bool
) -> torch.Tensor:
    """A tensor of zeros. On a CPU it takes memory only where it is written, and gives it back.

    Pages are asked of the system itself: an allocator may hand out what it has used before, which
    would have to be overwritten, room that is never needed included.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(size, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, num_bytes)
    except OSError as error:
        raise MemoryError(f"not enough memory for {num_bytes:,} bytes of keys or values") from error
    if is_tight and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # A kernel without them.
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(size)


def group_by_length(lengths: Sequence[RowLength]) -> list[list[RowLength]]:
    """Cuts rows, longest prompt first, where a row is much shorter than the first of its group."""
    groups: list[list[RowLength]] = []
    for length in sorted(lengths, key=lambda length: (-length.prompt, length.row)):
        if groups and length.prompt * _WASTE + _SLACK >= groups[-1][0].prompt:
            groups[-1].append(length)
        else:
            groups.append([length])
    return groups
