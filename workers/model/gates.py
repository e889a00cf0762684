"""Gated feed-forward layers of a model on a CPU: the gate is applied in one pass over memory.

down(act(gate(x)) * up(x))     two multiplies, and one function between them
"""

import torch
from torch import nn

from workers.model.kernels import Kernels
from workers.model.linears import PackedLinear, fit_together, plain_layers
from workers.model.mapped import MappedFiles

_NAMES = ("gate_proj", "up_proj", "down_proj")
"Names under which architectures keep the three multiplies."
_ROWS_AT_A_TIME = 1024
"Wide rows take memory, and no multiply is faster with more of them."
_TOLERANCE = 1e-5
"Of the spread of the output, between two ways to compute it in float32."


def replace_gates(model: nn.Module, kernels: Kernels) -> None:
    """Replaces a float32 model's gated layers, where that is what they are.

    Architectures name them alike, and apply gates of several kinds. So each is asked, not read: it
    is replaced if it acts as a gate by silu.
    """
    files = MappedFiles()
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            linears = plain_layers(layer)
            if linears.keys() != set(_NAMES):
                continue
            gate, up, down = (linears[name] for name in _NAMES)
            if fit_together([gate, up]) and down.in_features == up.out_features:
                gated = _Gated(gate, up, down, kernels)
                if _acts_alike(layer, gated, gate.in_features):
                    setattr(parent, name, gated)
                    for linear in linears.values():
                        files.give_back(linear.weight)


def _acts_alike(layer: nn.Module, gated: nn.Module, width: int) -> bool:
    probe = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    found = gated(probe)
    try:
        expected = layer(probe)
    except TypeError:  # It wants more than its input.
        return False
    if not isinstance(expected, torch.Tensor) or expected.shape != found.shape:
        return False
    return bool((expected - found).norm() <= _TOLERANCE * expected.norm())


class _Gated(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, kernels: Kernels) -> None:
        super().__init__()
        self._gate_up = PackedLinear([gate, up])
        self.down_proj = PackedLinear([down])
        self._kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., K]"""
        if x.shape[-2] <= _ROWS_AT_A_TIME:
            return self._run(x)
        out = x.new_empty(*x.shape[:-1], self.down_proj.out_features)
        for start in range(0, x.shape[-2], _ROWS_AT_A_TIME):
            piece = slice(start, start + _ROWS_AT_A_TIME)
            out[..., piece, :] = self._run(x[..., piece, :])
        return out

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self._kernels.gate(self._gate_up(x)))
        return out
