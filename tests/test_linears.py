"""Layers that are put in the place of a model's own: they compute the same, or stay away."""

from pathlib import Path

import pytest
import torch
from tiny_models import random_model
from torch import nn
from transformers import (
    CohereConfig,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

from workers.model.gates import replace_gates
from workers.model.kernels import load_kernels
from workers.model.linears import pack_linears
from workers.model.mapped import MappedFiles
from workers.model.norms import replace_norms
from workers.model.rotary import replace_rotary

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 16, bias=True)
        self.k_proj = nn.Linear(8, 4, bias=True)
        self.v_proj = nn.Linear(8, 4, bias=True)


@pytest.mark.parametrize("order", ["qkv", "vkq", "qqkkvv"])
def test_layers_that_share_an_input_are_one_multiply_in_any_order(order: str) -> None:
    torch.manual_seed(0)
    layer = Attention()
    x, other = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    with torch.inference_mode():
        expected = {name: getattr(layer, f"{name}_proj")(x) for name in "qkv"}
        expected_other = layer.k_proj(other)
        pack_linears(layer)

        for name in order:
            torch.testing.assert_close(getattr(layer, f"{name}_proj")(x), expected[name])
        torch.testing.assert_close(layer.k_proj(other), expected_other)
        torch.testing.assert_close(layer.q_proj(x), expected["q"])


def test_an_input_without_rows_is_an_output_without_rows() -> None:
    model = nn.Sequential(nn.Linear(8, 5))
    pack_linears(model)

    with torch.inference_mode():
        assert model(torch.empty(0, 8)).shape == (0, 5)


def test_layers_of_other_kinds_and_types_stay() -> None:
    class Strange(nn.Linear):
        pass

    model = nn.ModuleDict({"strange": Strange(4, 4), "halved": nn.Linear(4, 4).half()})
    before = dict(model.items())

    pack_linears(model)

    assert dict(model.items()) == before


def test_packed_layers_hold_no_second_copy_of_the_weights() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    pack_linears(model)

    assert model[0].weight.shape == (64, 64)
    assert model[0].weight.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, GemmaConfig])
def test_norms_are_replaced_whatever_their_gain_is_called(config: type) -> None:
    """Gemma's gain is 1 + weight, and its norms are no instances of Llama's."""
    extra = {"head_dim": 8} if config is GemmaConfig else {}
    model = random_model(config(**SIZES, **extra))
    ids = torch.tensor([[5, 9, 30, 4, 8]])
    with torch.inference_mode():
        expected = model(input_ids=ids).logits

        replace_norms(model, load_kernels())

        assert type(model.model.norm).__name__ == "_Norm"
        # 1e-4: float32 sums over 32 channels; logits spread by 1 to 2.
        torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-4, rtol=0)


def test_what_is_called_a_norm_and_is_none_stays() -> None:
    class OddRMSNorm(nn.Module):
        eps = 1e-6

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / x.abs().mean(-1, keepdim=True) * self.weight

    model = nn.Sequential(OddRMSNorm())

    with torch.inference_mode():
        replace_norms(model, load_kernels())

    assert isinstance(model[0], OddRMSNorm)


@pytest.mark.parametrize(
    ("config", "extra", "is_replaced"),
    [
        (LlamaConfig, {}, True),
        (LlamaConfig, {"mlp_bias": True}, True),
        (Qwen2Config, {}, True),
        (LlamaConfig, {"hidden_act": "gelu"}, False),
        (GemmaConfig, {"head_dim": 8}, False),
        (PhiConfig, {}, False),
    ],
)
def test_gates_by_silu_are_replaced_and_others_stay(
    config: type, extra: dict, is_replaced: bool
) -> None:
    """Gemma's gate is a gelu, and Phi has none."""
    model = random_model(config(**SIZES, **extra))
    ids = torch.tensor([[5, 9, 30, 4, 8]])
    kinds = [type(layer.mlp) for layer in model.model.layers]
    with torch.inference_mode():
        expected = model(input_ids=ids).logits

        replace_gates(model, load_kernels())

        assert is_replaced == ([type(layer.mlp) for layer in model.model.layers] != kinds)
        # 1e-4: float32 sums over 48 channels; logits spread by 1 to 2.
        torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("config", "extra", "is_replaced"),
    [
        (LlamaConfig, {}, True),
        (Qwen2Config, {}, True),
        (Qwen3Config, {"head_dim": 8}, True),
        (GemmaConfig, {"head_dim": 8}, True),
        (GPTNeoXConfig, {}, True),
        (PhiConfig, {"partial_rotary_factor": 0.5}, True),
        (CohereConfig, {}, False),
    ],
)
def test_halves_of_heads_are_turned_by_one_function_and_others_stay(
    config: type, extra: dict, is_replaced: bool
) -> None:
    """Cohere turns pairs. GPT-NeoX and Phi turn a part of each head, which is left to theirs."""
    model = random_model(config(**SIZES, **extra))
    ids = torch.tensor([[5, 9, 30, 4, 8]])
    with torch.inference_mode():
        expected = model(input_ids=ids).logits

        replace_rotary(model, load_kernels())

        replaced = [m for m in model.modules() if "forward" in vars(m)]
        assert len(replaced) == 2 * is_replaced
        # 1e-4: float32 sums over 32 channels; logits spread by 1 to 2.
        torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-4, rtol=0)


def test_another_model_of_the_same_kind_keeps_its_own_function() -> None:
    model, other = (random_model(LlamaConfig(**SIZES)) for _ in range(2))

    replace_rotary(model, load_kernels())

    assert not any("forward" in vars(module) for module in other.modules())


@pytest.mark.parametrize("form", ["gives more", "wants more", "scales"])
def test_what_has_the_names_of_a_gate_and_is_none_stays(form: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(8, 12), nn.Linear(8, 12)
            self.down_proj = nn.Linear(12, 8)

        def gated(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    class GivesMore(Odd):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
            return self.gated(x), 0.0

    class WantsMore(Odd):
        def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
            return scale * self.gated(x)

    class Scales(Odd):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.001 * self.gated(x)

    kind = {"gives more": GivesMore, "wants more": WantsMore, "scales": Scales}[form]
    model = nn.Sequential(kind())

    with torch.inference_mode():
        replace_gates(model, load_kernels())

    assert type(model[0]) is kind


def mapped_weight(path: Path, *, shape: tuple[int, int] = (100, 300)) -> torch.Tensor:
    """A weight in a file that is mapped, as weights of a model are."""
    torch.arange(shape[0] * shape[1], dtype=torch.float32).numpy().tofile(path)
    size = shape[0] * shape[1]
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.float32).view(shape)


def test_pages_of_a_file_that_are_given_back_are_read_again(tmp_path: Path) -> None:
    weight = mapped_weight(tmp_path / "weights")
    before = weight.sum()

    given = MappedFiles().give_back(weight)

    assert weight.nbytes - 2 * 4096 <= given <= weight.nbytes
    assert weight.sum() == before
    assert weight[99, 299] == 29_999


def test_what_was_written_or_is_in_no_file_is_kept(tmp_path: Path) -> None:
    """Else it would be lost: no file has it."""
    written, own = mapped_weight(tmp_path / "weights"), torch.ones(100, 300)
    written[50, 50] = -1

    files = MappedFiles()

    assert files.give_back(written) == files.give_back(own) == 0
    assert written[50, 50] == -1
    assert own.sum() == 30_000


def test_a_packed_layer_leaves_its_file(tmp_path: Path) -> None:
    weight = mapped_weight(tmp_path / "weights")
    model = nn.Sequential(nn.Linear(300, 100))
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    x = torch.full((5, 300), 2.0**-16)
    expected = model(x)

    pack_linears(model)

    assert held_bytes(tmp_path / "weights") <= 3 * 4096
    torch.testing.assert_close(model(x), expected)


def test_a_table_leaves_its_file_after_each_use(tmp_path: Path) -> None:
    weight = mapped_weight(tmp_path / "weights")
    table = nn.Embedding(100, 300)
    table.weight = nn.Parameter(weight, requires_grad=False)
    pack_linears(nn.Sequential(table))

    rows = table(torch.tensor([3, 99]))

    assert held_bytes(tmp_path / "weights") <= 3 * 4096
    assert rows[:, 0].tolist() == [900, 29_700]


def held_bytes(path: Path) -> int:
    """Of a file's mapped pages, those that lie in this process's memory."""
    [mapping] = [
        entry
        for entry in Path("/proc/self/smaps").read_text().split("VmFlags")
        if str(path) in entry
    ]
    return int(mapping.split("Rss:")[1].split()[0]) * 1024
