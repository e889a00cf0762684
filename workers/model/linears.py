"""Linear layers of a model on a CPU: weights laid out once for oneDNN, and one multiply for those
that read the same input.

    q_proj  k_proj  v_proj          gate_proj  up_proj
    |------ one multiply ---|       |-- one multiply -|
"""

from collections.abc import Sequence

import torch
from torch import nn

from workers.model.mapped import MappedFiles

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"Names under which architectures keep layers that read the same input."
_ROWS = 64
"A batch of about so many rows is what the layout is made for."


def pack_linears(model: nn.Module) -> None:
    """Replaces a float32 model's linear layers by packed ones. Memory: one more copy of each.

    Whether the model still computes the same is for the caller to prove: an architecture may use a
    layer in a way of its own.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    files = MappedFiles()
    for parent in list(model.modules()):
        layers = plain_layers(parent)
        originals = list(layers.values())
        for names in _TOGETHER:
            if layers.keys() >= set(names) and fit_together([layers[name] for name in names]):
                shared = _SharedInput([layers.pop(name) for name in names])
                for place, name in enumerate(names):
                    setattr(parent, name, _Piece(shared, place))
        for name, layer in layers.items():
            setattr(parent, name, PackedLinear([layer]))
        for layer in originals:
            files.give_back(layer.weight)
    for table in model.modules():
        if isinstance(table, nn.Embedding) and files.give_back(table.weight):
            _give_back_after_use(table, files)


def _give_back_after_use(table: nn.Embedding, files: MappedFiles) -> None:
    """A pass reads few rows of a table, and the system maps whole pages around each."""

    def give_back(*_: object) -> None:
        files.give_back(table.weight)

    table.register_forward_hook(give_back)


def plain_layers(parent: nn.Module) -> dict[str, nn.Linear]:
    """Linear layers right below a module that are nothing else, by name."""
    return {
        name: layer
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear
        and layer.weight.dtype == torch.float32
        and layer.weight.device.type == "cpu"
    }


def fit_together(layers: Sequence[nn.Linear]) -> bool:
    """True if all read inputs of one width, and all or none add a bias."""
    kinds = {(layer.in_features, layer.bias is None) for layer in layers}
    return len(kinds) == 1


class PackedLinear(nn.Module):
    """One multiply for the layers, with outputs side by side."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        weight = layers[0].weight.detach()
        if len(layers) > 1:
            weight = torch.cat([layer.weight.detach() for layer in layers])
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self.bias = torch.cat(biases) if biases else None
        self.weight = _shadow(weight)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]"""
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.out_features)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return result


class _SharedInput:
    """Layers that read the same input: the first that is called computes for all."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._packed = PackedLinear(layers)
        self._sizes = [layer.out_features for layer in layers]
        self._input: torch.Tensor | None = None
        self._pieces: dict[int, torch.Tensor] = {}

    def take(self, x: torch.Tensor, place: int) -> torch.Tensor:
        """The output of the layer at a place."""
        if self._input is not x or place not in self._pieces:
            pieces = self._packed(x).split(self._sizes, dim=-1)
            self._input, self._pieces = x, dict(enumerate(pieces))
        piece = self._pieces.pop(place)
        if not self._pieces:
            self._input = None
        return piece


class _Piece(nn.Module):
    """One of the layers that share an input."""

    def __init__(self, shared: _SharedInput, place: int) -> None:
        super().__init__()
        self._shared = shared
        self._place = place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]"""
        return self._shared.take(x, self._place)


def _shadow(weight: torch.Tensor) -> torch.Tensor:
    """What an architecture may ask of a weight, its shape and type, without its memory."""
    return torch.zeros((), dtype=weight.dtype).expand(weight.shape)
