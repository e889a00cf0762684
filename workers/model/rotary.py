"""Rotary embeddings of a model on a CPU: queries and keys are turned where they lie, in one pass.

x * cos + (-second half of x, first half of x) * sin     six passes, as PyTorch does it
"""

import inspect
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from workers.model.kernels import Kernels

_NAME = "apply_rotary_pos_emb"
"Under which the modules of architectures keep the function."
_TOLERANCE = 1e-5
"Of numbers about 1, between two ways to turn them in float32."


def replace_rotary(model: nn.Module, kernels: Kernels) -> None:
    """Gives the attention layers of a float32 model a compiled function to turn by.

    Architectures turn in several ways under one name: in halves, in pairs, a part of each head. So
    each is asked, not read: its function is replaced if it turns halves of whole heads. It is a
    name of the library's module, so each layer gets a forward of its own that finds ours there.
    """
    found: dict[FunctionType, FunctionType | None] = {}
    for layer in model.modules():
        forward = inspect.unwrap(type(layer).forward)
        if not isinstance(forward, FunctionType) or _NAME not in forward.__code__.co_names:
            continue
        if forward not in found:
            turn = _Turn(forward.__globals__.get(_NAME), kernels)
            found[forward] = _with_turn(forward, turn) if turn.is_alike() else None
        ours = found[forward]
        if ours is not None:
            layer.forward = MethodType(ours, layer)


def _with_turn(forward: FunctionType, turn: "_Turn") -> FunctionType:
    """The same function, for which the name means another thing."""
    copy = FunctionType(
        forward.__code__,
        forward.__globals__ | {_NAME: turn},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


class _Turn:
    """What stands for an architecture's own function, which does what ours cannot."""

    def __init__(self, theirs: Any, kernels: Kernels) -> None:
        self._theirs = theirs
        self._kernels = kernels

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k [1, heads, T, D], turned in place; cos and sin [1, T, D]."""
        if cos.shape != (1, *q.shape[2:]) or k.shape[2:] != q.shape[2:]:
            turned: tuple[torch.Tensor, torch.Tensor] = self._theirs(q, k, cos, sin)
            return turned
        cos, sin = cos[0].contiguous(), sin[0].contiguous()
        rotate = self._kernels.rotate
        return rotate(q[0], cos, sin)[None], rotate(k[0], cos, sin)[None]

    def is_alike(self) -> bool:
        """True if both functions do the same with whole heads."""
        generator = torch.Generator().manual_seed(0)
        probe = [
            torch.randn(shape, generator=generator)
            for shape in ((1, 4, 3, 8), (1, 2, 3, 8), (1, 3, 8), (1, 3, 8))
        ]
        try:
            expected = self._theirs(*probe)
        except (TypeError, RuntimeError, AttributeError):  # It wants something else.
            return False
        found = self(*(x.clone() for x in probe))
        return isinstance(expected, tuple) and all(
            isinstance(a, torch.Tensor) and torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE)
            for a, b in zip(expected, found, strict=True)
        )
