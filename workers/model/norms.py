"""Norms of a model on a CPU, computed in one pass over memory instead of six."""

import torch
from torch import nn

from workers.model.kernels import Kernels

_TOLERANCE = 1e-5
"Of numbers about 1, between two ways to sum up a hidden state in float32."


def replace_norms(model: nn.Module, kernels: Kernels) -> None:
    """Replaces a model's RMS norms by one compiled function, where that is what they are.

    Architectures have norms of many names, and put gains into them in several ways (1 + weight in
    Gemma). So each is asked, not read: it is replaced if it acts as a norm with a gain.
    """
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer).__name__.endswith("RMSNorm"):
                setattr(parent, name, _ask(layer, kernels))


def _ask(layer: nn.Module, kernels: Kernels) -> nn.Module:
    """A norm that does the same; the layer itself if it is none, or more than one."""
    parameters = list(layer.parameters())
    epsilon = next(
        (
            float(getattr(layer, name))
            for name in ("variance_epsilon", "eps")
            if hasattr(layer, name)
        ),
        None,
    )
    if epsilon is None or len(parameters) != 1 or parameters[0].dtype != torch.float32:
        return layer
    width = parameters[0].numel()
    ones = torch.ones(1, width)
    gain = layer(ones)[0] * (1 + epsilon) ** 0.5
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(3, width, generator=generator)
    norm = _Norm(gain, epsilon, kernels)
    expected, found = layer(probe), norm(probe)
    is_same = expected.shape == found.shape and torch.allclose(
        expected, found, rtol=_TOLERANCE, atol=_TOLERANCE
    )
    return norm if is_same else layer


class _Norm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * gain."""

    def __init__(self, gain: torch.Tensor, epsilon: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight = gain
        self._epsilon = epsilon
        self._kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., K]"""
        return self._kernels.rms_norm(x, self.weight, self._epsilon)
