"""Keys and values of all open batches of a GPU's pipeline, in one stretch of tokens a layer.

    |row 0 . . . ....|row 1 . .....|row 2 . . .|      free      |pads|
     ^start   ^written

It is allocated once, since captured graphs hold its addresses. A batch claims a stretch of it, in
which each row has a place of its own size. The pads at the end are rows of one token that fill up a
graph's batch. Letters: C tokens of room, H key-value heads, T tokens of a pass, D numbers a head.
"""

import math
from collections.abc import Mapping, Sequence

import torch

from workers.model.shape import LayerShape
from workers.pipeline import CacheFullError

_SHARE = 0.75
"Of the memory that is free when weights are loaded. The rest is for activations and logits."


class SlotCache:
    """Room for tokens, one tensor of keys and one of values a layer."""

    def __init__(self, capacity: int, num_pads: int, device: torch.device) -> None:
        self.capacity = capacity
        self.device = device
        self.pads_start = capacity
        self.keys: dict[int, torch.Tensor] = {}
        "[C, H, D] by layer."
        self.values: dict[int, torch.Tensor] = {}
        self._num_tokens = capacity + num_pads
        self._taken: dict[int, int] = {}
        "Length by start."

    def allocate(self, layer: int, shape: LayerShape) -> None:
        """Makes room for one layer, unless it has some."""
        if layer in self.keys:
            return
        for tensors, width in ((self.keys, shape.key_dim), (self.values, shape.value_dim)):
            size = (self._num_tokens, shape.num_kv_heads, width)
            tensors[layer] = torch.zeros(size, dtype=shape.dtype, device=self.device)

    def claim(self, num_tokens: int) -> int:
        """The start of a stretch that is free, the first that is long enough.

        Raises CacheFullError if open batches leave none, MemoryError if there is none at all.
        """
        start = 0
        for taken, length in sorted(self._taken.items()):
            if taken - start >= num_tokens:
                break
            start = taken + length
        if start + num_tokens > self.capacity:
            words = f"{num_tokens:,} tokens do not fit into a cache of {self.capacity:,}"
            if self._taken:
                raise CacheFullError(f"{words} beside the batches that are open. Close one first.")
            raise MemoryError(f"{words}: not enough memory. Run fewer or shorter rows together.")
        self._taken[start] = num_tokens
        return start

    def release(self, start: int) -> None:
        """Gives back what claim gave."""
        del self._taken[start]

    def store(
        self, layer: int, places: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes key and value [H, T, D] to places [T]. Returns all keys and values [C, H, D]."""
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(0, places, key.transpose(0, 1))
        values.index_copy_(0, places, value.transpose(0, 1))
        return keys, values

    def repeat(self, start: int, length: int, targets: Sequence[int]) -> None:
        """Copies a stretch to each of the targets, all at once."""
        to = torch.tensor(targets).to(self.device)[:, None]
        places = to + torch.arange(length, device=self.device)
        for tensors in (self.keys, self.values):
            for tensor in tensors.values():
                tensor[places] = tensor[start : start + length].clone()


def fit_capacity(wanted: int, shapes: Mapping[int, LayerShape], device: torch.device) -> int:
    """As many tokens as are wanted, or as the free memory of a GPU has room for."""
    if device.type != "cuda":
        return wanted
    token_bytes = sum(
        shape.num_kv_heads * (shape.key_dim + shape.value_dim) * shape.dtype.itemsize
        for shape in shapes.values()
    )
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return min(wanted, math.floor(free_bytes * _SHARE / token_bytes))
