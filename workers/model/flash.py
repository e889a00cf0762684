"""Flash attention over rows of unlike length, from torch.nn.attention.varlen, on a GPU.

Rows lie in the cache with gaps between them, and not every version of PyTorch can be told where
each ends. So the gaps are told as rows too, which have no queries:

    keys        |gap|  row  |gap|  row  |
    queries     | 0 | some  | 0 | some  |

Letters: T tokens, N rows, G query heads a key-value head, H key-value heads, C tokens of room, D
numbers a head.
"""

import inspect
from collections.abc import Callable
from typing import cast

import torch
from torch.nn.attention import varlen

_NEEDED = {"scale", "window_size"}
"Arguments that came with PyTorch 2.11."
_HALF = (torch.bfloat16, torch.float16)


class Flash:
    """The function, called with the arguments that it takes."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self._function = function
        self._shares_heads = "enable_gqa" in inspect.signature(function).parameters

    @staticmethod
    def runs(key: torch.Tensor, value: torch.Tensor, softcap: float | None) -> bool:
        """True if it can attend such keys and values: half precision, one width, no soft cap."""
        return key.dtype in _HALF and key.shape[-1] == value.shape[-1] and softcap is None

    def attend_back(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bounds: tuple[torch.Tensor, torch.Tensor],
        longest: tuple[int, int],
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Each query sees the keys of its row up to its own place, counted from the row's end.

        query [T, G * H, D], keys and values [C, H, D] -> [T, G * H, D]. bounds: where rows begin
        and end among queries and keys, gaps included, int32.
        """
        num_groups = query.shape[1] // keys.shape[1]
        sight = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
        if num_groups == 1:
            return self._function(query, keys, values, *bounds, *longest, **sight)
        if self._shares_heads:
            return self._function(query, keys, values, *bounds, *longest, **sight, enable_gqa=True)
        grouped = query.view(len(query), keys.shape[1], num_groups, -1)
        pieces = [
            self._function(grouped[:, :, group], keys, values, *bounds, *longest, **sight)
            for group in range(num_groups)
        ]
        return torch.stack(pieces, dim=2).flatten(1, 2)

    def attend_all(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bounds: tuple[torch.Tensor, torch.Tensor],
        longest: int,
        *,
        scale: float,
    ) -> torch.Tensor:
        """One query a row, which sees all keys within the row's bounds.

        query [N, H, G, D], keys and values [C, H, D] -> [N, G * H, D]. The query heads of a
        key-value head stand where tokens would, so that its keys are read once for all of them.
        """
        num_rows, num_heads, num_groups, _ = query.shape
        stacked = query.transpose(1, 2).reshape(num_rows * num_groups, num_heads, -1)
        attended = self._function(stacked, keys, values, *bounds, num_groups, longest, scale=scale)
        return attended.view(num_rows, num_groups, num_heads, -1).transpose(1, 2).flatten(1, 2)


def find_flash(device: torch.device) -> Flash | None:
    """Flash attention, where this PyTorch and this device have it."""
    has_arguments = set(inspect.signature(varlen.varlen_attn).parameters) >= _NEEDED
    function = cast("Callable[..., torch.Tensor]", varlen.varlen_attn)
    return Flash(function) if device.type == "cuda" and has_arguments else None
