"""The compiled functions against PyTorch's own, and what is done without a compiler."""

from pathlib import Path

import pytest
import torch

from jobs.errors import ModelError
from workers.model import build
from workers.model.attention import _decode
from workers.model.build import has_kernels
from workers.model.kernels import Kernels, load_kernels
from workers.model.kv_cache import KVBlock
from workers.model.sampling import best_sorted
from workers.model.shape import AttentionSettings, LayerShape
from workers.model.steps import DecodeStep


@pytest.fixture(scope="module")
def compiled() -> Kernels:
    return load_kernels()


def filled_block(places: int, room: int, shape: LayerShape, seed: int) -> KVBlock:
    """A block of rows of many lengths, full of noise."""
    generator = torch.Generator().manual_seed(seed)
    block = KVBlock(places, room, torch.device("cpu"))
    block.allocate(0, shape)
    block.admit(list(range(places)), None)
    block.keys[0].normal_(generator=generator)
    block.values[0].normal_(generator=generator)
    block.written[:] = torch.randint(0, room, (places,), generator=generator).numpy()
    return block


@pytest.mark.parametrize(
    ("num_kv_heads", "group", "key_dim", "value_dim", "window", "softcap"),
    [
        (3, 3, 64, 64, None, None),
        (1, 1, 8, 8, None, None),
        (2, 4, 20, 13, None, None),
        (2, 2, 16, 96, 7, None),
        (1, 3, 33, 72, None, 5.0),
        (2, 1, 8, 8, 5, 3.0),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_is_pytorchs(
    compiled: Kernels,
    num_kv_heads: int,
    group: int,
    key_dim: int,
    value_dim: int,
    window: int | None,
    softcap: float | None,
    threads: int,
) -> None:
    shape = LayerShape(num_kv_heads, key_dim, value_dim, torch.float32, window)
    block = filled_block(9, 37, shape, seed=3)
    settings = AttentionSettings(key_dim**-0.5, window, softcap)
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(9, num_kv_heads * group, key_dim, generator=generator).transpose(0, 1)
    key = torch.randn(num_kv_heads, 9, key_dim, generator=generator)
    value = torch.randn(9, num_kv_heads, value_dim, generator=generator).transpose(0, 1)
    step = DecodeStep(block, torch.zeros(9, dtype=torch.long))
    keys, values = block.keys[0].clone(), block.values[0].clone()
    before = torch.get_num_threads()
    found = torch.empty(9, num_kv_heads * group, value_dim)

    expected = _decode(step, settings, keys, values, query, key, value)
    torch.set_num_threads(threads)
    compiled.decode(step, settings, block.keys[0], block.values[0], query, key, value, found)
    torch.set_num_threads(before)

    # 1e-5: float32 sums of up to 37 weights that add up to 1, of values about 1.
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert torch.equal(block.keys[0], keys)
    assert torch.equal(block.values[0], values)


def test_a_row_attends_alike_whoever_is_beside_it(compiled: Kernels) -> None:
    """To the last bit: no sum runs over rows, and no row is padded to another's length."""
    shape = LayerShape(2, 16, 16, torch.float32, None)
    settings = AttentionSettings(0.25, None, None)
    outputs = []
    for num_rows in (9, 4):
        block = filled_block(9, 37, shape, seed=3)
        step = DecodeStep(block, torch.zeros(num_rows, dtype=torch.long))
        generator = torch.Generator().manual_seed(4)
        query = torch.randn(9, 6, 16, generator=generator)[:num_rows].transpose(0, 1)
        key = torch.randn(9, 2, 16, generator=generator)[:num_rows].transpose(0, 1)
        output = torch.empty(num_rows, 6, 16)
        compiled.decode(
            step, settings, block.keys[0], block.values[0], query, key, key.clone(), output
        )
        outputs.append(output[:4])

    assert torch.equal(outputs[0], outputs[1])


def test_a_row_of_nan_reaches_no_other_row(compiled: Kernels) -> None:
    block = filled_block(3, 12, LayerShape(1, 8, 8, torch.float32, None), seed=1)
    block.keys[0][1] = torch.nan
    step = DecodeStep(block, torch.zeros(3, dtype=torch.long))
    new = torch.ones(1, 3, 8)
    output = torch.empty(3, 1, 8)
    settings = AttentionSettings(1.0, None, None)

    compiled.decode(step, settings, block.keys[0], block.values[0], new, new, new, output)

    assert [bool(row.isnan().any()) for row in output] == [False, True, False]


@pytest.mark.parametrize("vocab_size", [1, 7, 511, 512, 513, 5000])
def test_the_best_logit_is_the_lowest_id_of_the_greatest(
    compiled: Kernels, vocab_size: int
) -> None:
    z = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(0))
    z[1, vocab_size // 2 :] = 9.0
    z[2] = -torch.inf
    z[3, vocab_size - 1] = torch.nan
    z[4, vocab_size - 1] = torch.inf

    best, ids = compiled.find_best(z)

    expected, places = z.max(dim=1)
    torch.testing.assert_close(best, expected, rtol=0, atol=0, equal_nan=True)
    assert [ids[row] for row in (0, 1, 2, 4, 5)] == [places[row] for row in (0, 1, 2, 4, 5)]


@pytest.mark.parametrize("vocab_size", [1, 7, 513, 49_152])
def test_the_mass_is_that_of_float64(compiled: Kernels, vocab_size: int) -> None:
    """1e-6 nats: a tenth of what float32 log_softmax is off by on a CPU."""
    z = 4 * torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(0))
    z[1] += 1e4
    z[2, : vocab_size // 2] = -torch.inf
    best = z.max(dim=1).values

    mass = compiled.log_mass(z, best)

    exact = torch.logsumexp(z.double() - best.double()[:, None], dim=1)
    torch.testing.assert_close(mass.double(), exact, atol=1e-6, rtol=0)


@pytest.mark.parametrize("count", [1, 5, 64])
def test_the_top_is_that_of_a_stable_sort(compiled: Kernels, count: int) -> None:
    """Small whole numbers: most logits have equals, within the list and at its end."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randint(-3, 4, (8, 203), generator=generator).float()
    z[1] = -torch.inf
    z[2] = torch.arange(203.0)

    values, ids = compiled.find_top(z, count)

    expected_values, expected_ids = best_sorted(z, count)
    assert torch.equal(values, expected_values)
    assert torch.equal(ids, expected_ids)


def test_the_norm_is_pytorchs(compiled: Kernels) -> None:
    for width in (3, 8, 61):
        generator = torch.Generator().manual_seed(width)
        x = torch.randn(2, 5, width, generator=generator)
        gain = torch.randn(width, generator=generator)
        expected = torch.nn.functional.rms_norm(x, (width,), gain, 1e-5)
        # 1e-5: float32 sums of up to 61 squares about 1.
        torch.testing.assert_close(compiled.rms_norm(x, gain, 1e-5), expected, atol=1e-5, rtol=0)


def test_without_a_compiler_it_is_said_and_pytorch_does_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "_COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(build, "cached_assets_path", lambda *_, **__: tmp_path)
    caplog.set_level("INFO")

    assert not has_kernels()
    assert "no C compiler here (no-such-compiler)" in caplog.text
    with pytest.raises(ModelError, match="Install one, or use --kernels torch"):
        load_kernels()


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(build, "_COMPILERS", (str(broken),))
    monkeypatch.setattr(build, "cached_assets_path", lambda *_, **__: tmp_path)

    with pytest.raises(ModelError, match=r"cannot compile kernels\.c: no such flag"):
        load_kernels()
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_a_damaged_library_is_no_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "cached_assets_path", lambda *_, **__: tmp_path)
    build.build_kernels().write_bytes(b"not a library")

    assert not has_kernels()
    with pytest.raises(ModelError, match="cannot be loaded here"):
        load_kernels()


def test_without_threads_the_compiler_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "_THREADS", ("-fno-such-thing",))
    monkeypatch.setattr(build, "cached_assets_path", lambda *_, **__: tmp_path)

    best, ids = load_kernels().find_best(torch.tensor([[1.0, 3.0, 2.0]]))

    assert (best.tolist(), ids.tolist()) == ([3.0], [1])
