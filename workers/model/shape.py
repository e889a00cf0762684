"""What a layer's keys and values look like, and how they are attended."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads and widths of one layer's keys and values."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None
    "Keys that a token looks back on, itself included; None for all."


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """What an architecture asks of a layer's attention beside the sums themselves."""

    scaling: float
    window: int | None
    "Keys that a token looks back on, itself included; None for all."
    softcap: float | None
