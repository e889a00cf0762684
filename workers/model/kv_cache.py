"""Keys and values of a batch's rows, allocated once, without padding to the longest row.

Rows of like length share a block, so that one attention call can serve all of them:

    block 0   row 4  |############........|      # written   . room for the answer
              row 1  |###########.........|
    block 1   row 0  |####........|
              row 3  |###.........|
              row 2  |##..........|

Live rows stand at the front of their block: when one ends, the last takes its place.
Letters: H key-value heads, C tokens of room, D numbers a head, n live rows of a block.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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
    """Rows of like length, with one tensor of keys and one of values a layer."""

    def __init__(self, lengths: Sequence[RowLength], device: torch.device) -> None:
        self.rows = [length.row for length in lengths]
        "Places in the batch of the live rows, in the order in which they stand here."
        self.lengths = [length.prompt for length in lengths]
        "Tokens written, or in prefill about to be written, by row."
        self.room = max(length.most for length in lengths)
        self.device = device
        self.keys: dict[int, torch.Tensor] = {}
        "[rows, H, C, D] by layer."
        self.values: dict[int, torch.Tensor] = {}
        self._places = len(lengths)

    def allocate(self, layer: int, shape: LayerShape) -> None:
        """Makes room for one layer. Zeros, since a masked NaN would still poison a sum."""
        for tensors, width in ((self.keys, shape.key_dim), (self.values, shape.value_dim)):
            size = (self._places, shape.num_kv_heads, self.room, width)
            tensors[layer] = zeros(size, shape.dtype, self.device)

    def release(self, row: int) -> None:
        """Lets the last live row take the place of one that has ended."""
        place, last = self.rows.index(row), len(self.rows) - 1
        if place != last:
            old, written = self.lengths[place], self.lengths[last]
            for tensors in (self.keys, self.values):
                for tensor in tensors.values():
                    tensor[place, :, :written] = tensor[last, :, :written]
                    tensor[place, :, written:old] = 0  # What the ended row left may be NaN.
            self.rows[place], self.lengths[place] = self.rows[last], self.lengths[last]
        del self.rows[last], self.lengths[last]


class KVCache:
    """The blocks of one batch."""

    def __init__(
        self,
        lengths: Sequence[RowLength],
        shapes: dict[int, LayerShape],
        device: torch.device,
    ) -> None:
        """Allocates every row of every layer, or raises and leaves nothing behind."""
        self._blocks = [KVBlock(group, device) for group in group_by_length(lengths)]
        for block in self._blocks:
            for layer, shape in shapes.items():
                block.allocate(layer, shape)

    @property
    def blocks(self) -> list[KVBlock]:
        """Blocks with live rows, longest first."""
        return [block for block in self._blocks if block.rows]

    @property
    def rows(self) -> list[int]:
        """Places in the batch of all live rows, in the order in which a pass runs them."""
        return [row for block in self.blocks for row in block.rows]

    def release(self, row: int) -> None:
        """Frees a row; a block without rows gives its memory back."""
        block = next(block for block in self._blocks if row in block.rows)
        block.release(row)
        if not block.rows:
            self._blocks.remove(block)


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros. On a CPU it takes memory only where it is written, as numpy's do."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return (
        torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, np.uint8))
        .view(dtype)
        .view(size)
    )


def group_by_length(lengths: Sequence[RowLength]) -> list[list[RowLength]]:
    """Cuts rows, longest prompt first, where a row is much shorter than the first of its group."""
    groups: list[list[RowLength]] = []
    for length in sorted(lengths, key=lambda length: (-length.prompt, length.row)):
        if groups and length.prompt * _WASTE + _SLACK >= groups[-1][0].prompt:
            groups[-1].append(length)
        else:
            groups.append([length])
    return groups
