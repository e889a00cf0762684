"""Architectures run ragged against their own forward pass, and those that cannot be."""

import numpy as np
import pytest
import torch
import transformers
from tiny_models import random_model
from transformers import PreTrainedConfig, PreTrainedModel

from jobs.errors import ModelError
from jobs.sampling import RowSampling
from workers.model import ragged
from workers.model.attention import RAGGED
from workers.model.kernels import Kernels, load_kernels
from workers.model.kv_cache import PAGE
from workers.model.proof import prove_ragged
from workers.model.ragged import RaggedForward
from workers.model.steps import Step
from workers.pipeline import RowContext
from workers.turns import Turns

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GPT2_SIZES = {"vocab_size": 64, "n_positions": 128, "n_embd": 32, "n_layer": 3, "n_head": 4}
EXPERTS = {"num_experts_per_tok": 2, "pad_token_id": 0}

RUN = {
    "Llama": SIZES,
    "Qwen2": SIZES,
    "Qwen2 with a window": SIZES
    | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "Qwen3": SIZES | {"head_dim": 8},
    "Gemma": SIZES | {"head_dim": 8},
    "Gemma2 with a window and soft caps": SIZES
    | {"head_dim": 8, "sliding_window": 5}
    | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "Gemma3Text with a window": SIZES | {"head_dim": 8, "sliding_window": 5},
    "Mistral with a window": SIZES | {"head_dim": 8, "sliding_window": 5},
    "GPT2": GPT2_SIZES,
    "Phi": SIZES,
    "Phi3": SIZES | {"pad_token_id": 0},
    "Olmo2": SIZES,
    "Granite": SIZES,
    "Cohere": SIZES,
    "Mixtral": SIZES | EXPERTS | {"num_local_experts": 4},
    "Qwen3Moe": SIZES | EXPERTS | {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16},
}
REFUSED = {
    "Mamba": ({"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3}, "linear_attention"),
    "Llama4Text": (SIZES | {"head_dim": 8, "num_local_experts": 2}, "chunked_attention"),
    "Bloom": (
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 3, "n_head": 4},
        "attention can be replaced in 0 of its 3 layers",
    ),
    "GptOss": (
        SIZES | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        "attention sinks are not supported",
    ),
    "Bert": (
        {k: SIZES[k] for k in list(SIZES)[:5]},
        "its logits are off its own forward pass by",
    ),
}


def make_config(name: str, sizes: dict[str, object]) -> PreTrainedConfig:
    return getattr(transformers, f"{name.split()[0]}Config")(**sizes)


def alone(model: PreTrainedModel, rows: list[list[int]]) -> list[torch.Tensor]:
    """[L, V] of each row by itself, as the architecture's authors wrote it."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]
    model.set_attn_implementation(RAGGED)
    return logits


def step_through(
    model: PreTrainedModel,
    rows: list[list[int]],
    *,
    num_steps: int,
    released: dict[int, int],
    kernels: Kernels | None = None,
) -> list[tuple[int, int, torch.Tensor]]:
    """Feeds the rows' last tokens one at a time. Returns (row, place, logits [V])."""
    contexts = [
        RowContext(tuple(row[: len(row) - num_steps]), RowSampling(num_steps + 1), 0)
        for row in rows
    ]
    seen = []
    with torch.inference_mode():
        shapes = prove_ragged(model, kernels)
        forward = RaggedForward(model, contexts, shapes, max_length=128, kernels=kernels)
        forward.admit(range(len(contexts)))
        for step in range(num_steps + 1):
            live, logits = forward.next_logits()
            places = [len(rows[row]) - num_steps - 1 + step for row in live]
            seen += list(zip(live.tolist(), places, logits, strict=True))
            if step < num_steps:
                following = [rows[row][place + 1] for row, place in zip(live, places, strict=True)]
                forward.append(live, np.array(following))
            for row, last_step in released.items():
                if last_step == step:
                    forward.release(row)
    return seen


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", RUN)
def test_rows_of_a_batch_equal_rows_alone(name: str, is_compiled: bool) -> None:
    """Prefill and decode, rows of four lengths, windows shorter than the rows, rows that end."""
    model = random_model(make_config(name, RUN[name]))
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(2, 63, (k,), generator=generator).tolist() for k in (23, 9, 40, 5, 24)]
    expected = alone(model, rows)

    kernels = load_kernels() if is_compiled else None
    seen = step_through(model, rows, num_steps=4, released={0: 1, 3: 2}, kernels=kernels)

    assert sorted(row for row, _, _ in seen) == [0] * 2 + [1] * 5 + [2] * 5 + [3] * 3 + [4] * 5
    for row, place, logits in seen:
        # 1e-4: float32 sums over 32 channels; logits spread by 1 to 2.
        torch.testing.assert_close(logits, expected[row][place], atol=1e-4, rtol=0)


@pytest.mark.parametrize("tokens_per_pass", [10, 1000])
@pytest.mark.parametrize("name", RUN)
def test_what_prompts_share_is_run_once_and_nothing_changes(
    name: str, tokens_per_pass: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that begin alike, longer than a window, in passes that cut both parts of them."""
    monkeypatch.setattr(ragged, "_TOKENS_PER_PASS", tokens_per_pass)
    model = random_model(make_config(name, RUN[name]))
    generator = torch.Generator().manual_seed(2)
    shared = torch.randint(2, 63, (21,), generator=generator).tolist()
    rows = [
        shared + torch.randint(2, 63, (k,), generator=generator).tolist() for k in (4, 17, 5, 30)
    ]
    expected = alone(model, rows)
    run = RaggedForward._run
    passes = []

    def counted(forward: RaggedForward, steps: list[Step]) -> torch.Tensor:
        passes.append(sum(step.num_tokens for step in steps))
        return run(forward, steps)

    shapes = prove_ragged(model)
    monkeypatch.setattr("test_ragged.prove_ragged", lambda *_: shapes)
    monkeypatch.setattr(RaggedForward, "_run", counted)
    seen = step_through(model, rows, num_steps=3, released={})

    # Every pass is counted, steps of one token among them; only whole pages are shared.
    num_shared = len(shared) // PAGE * PAGE
    assert sum(passes) == num_shared + sum(len(row) - num_shared for row in rows)
    assert len(seen) == 16
    for row, place, logits in seen:
        # 1e-4: float32 sums over 32 channels; logits spread by 1 to 2.
        torch.testing.assert_close(logits, expected[row][place], atol=1e-4, rtol=0)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_row_that_comes_later_takes_the_place_of_one_that_has_ended(is_compiled: bool) -> None:
    """Three rows in two places; the last is longer than what stood in its place before."""
    model = random_model(make_config("Llama", SIZES))
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(2, 63, (k,), generator=generator).tolist() for k in (9, 6, 12)]
    expected = alone(model, rows)
    contexts = [RowContext(tuple(row[:-3]), RowSampling(4), 0) for row in rows]
    kernels = load_kernels() if is_compiled else None
    shapes = prove_ragged(model, kernels)

    num_fed = [0, 0, 0]
    with torch.inference_mode():
        forward = RaggedForward(
            model, contexts, shapes, max_length=128, turns=Turns(2, 999), kernels=kernels
        )
        forward.admit([0, 1])
        for step in range(5):
            live, logits = forward.next_logits()
            assert sorted(live.tolist()) == ([0, 1] if step < 2 else [1, 2] if step < 4 else [2])
            for row, found in zip(live.tolist(), logits, strict=True):
                place = len(rows[row]) - 4 + num_fed[row]
                torch.testing.assert_close(found, expected[row][place], atol=1e-4, rtol=0)
            feed = [rows[row][len(rows[row]) - 3 + min(num_fed[row], 2)] for row in live]
            forward.append(live, np.array(feed))
            for row in live:
                num_fed[row] += 1
            if step == 1:
                forward.release(0)
                forward.admit([2])
            if step == 3:
                forward.release(1)

    assert num_fed == [2, 4, 3]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_ragged_is_refused_by_name(name: str) -> None:
    sizes, words = REFUSED[name]
    model = random_model(make_config(name, sizes))

    with pytest.raises(ModelError) as caught:
        prove_ragged(model)

    assert str(caught.value).startswith(type(model).__name__)
    assert words in str(caught.value)


def test_a_window_that_does_not_reach_the_layers_is_refused() -> None:
    """A short probe cannot tell a window from none; the config and the layers must agree."""
    model = random_model(make_config("Mistral", SIZES | {"sliding_window": 50}))

    class Forgetful:
        sliding_window = None

        def __getattr__(self, name: str) -> object:
            return getattr(model.config, name)

    for layer in model.model.layers:
        layer.self_attn.config = Forgetful()

    with pytest.raises(ModelError, match="sliding window of 50 does not reach the layers"):
        prove_ragged(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_to_single_as_the_architectures_own(dtype: torch.dtype) -> None:
    model = random_model(make_config("Llama", SIZES))
    rows = [[5, 9, 30, 4, 8], [7, 3, 11]]
    exact = alone(model, rows)
    own = alone(model.to(dtype), rows)

    for row, place, logits in step_through(model, rows, num_steps=1, released={}):
        off = (logits - exact[row][place]).norm()
        # A wrong mask or position is off by 2, the spread of the logits, a number.
        assert off <= 1.5 * (own[row][place] - exact[row][place]).norm()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_what_a_row_of_nan_leaves_behind_reaches_no_other_row(is_compiled: bool) -> None:
    """The last row takes the pages of the one that ends, and is shorter: beyond its own end, keys
    and values of the ended row lie under its mask, and 0 x NaN is NaN."""
    model = random_model(make_config("Llama", SIZES))
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(2, 60, (k,), generator=generator).tolist() for k in (12, 9, 4, 3)]
    rows[1][3] = 63
    with torch.no_grad():
        model.model.embed_tokens.weight[63] = torch.nan
    contexts = [RowContext(tuple(row), RowSampling(6), 0) for row in rows]

    kernels = load_kernels() if is_compiled else None

    with torch.inference_mode():
        shapes = prove_ragged(model, kernels)
        forward = RaggedForward(
            model, contexts, shapes, max_length=128, turns=Turns(3, 999), kernels=kernels
        )
        forward.admit(range(3))
        live, logits = forward.next_logits()
        assert [bool(row.isnan().any()) for row in logits] == [False, True, False]
        forward.append(live, np.array([5, 5, 5]))
        left = forward._cache.table[1, 0]
        forward.release(1)
        forward.admit([3])
        assert forward._cache.table[3, 0] == left
        for _ in range(2):
            live, logits = forward.next_logits()
            assert sorted(live.tolist()) == [0, 2, 3]
            assert logits.isfinite().all()
            forward.append(live, np.array([5, 5, 5]))
