"""The compiled functions against PyTorch's own, and what is done without a compiler."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from jobs.errors import ModelError
from workers.model import build
from workers.model.attention import _attend_prompt, _decode
from workers.model.build import has_kernels
from workers.model.kernels import Kernels, load_kernels
from workers.model.kv_cache import PAGE, KVCache, PagePool
from workers.model.readout import best_sorted
from workers.model.shape import AttentionSettings, LayerShape
from workers.model.steps import DecodeStep, PromptSpan


@pytest.fixture(scope="module")
def compiled() -> Kernels:
    return load_kernels()


CPU = torch.device("cpu")
ROOM = 37


def filled_cache(num_rows: int, shape: LayerShape, seed: int) -> KVCache:
    """Rows of many lengths, whose pages stand in any order and are full of noise."""
    generator = torch.Generator().manual_seed(seed)
    cache = KVCache(PagePool(CPU), [ROOM] * num_rows, num_rows * ROOM, num_rows)
    cache.pages.allocate(0, shape)
    cache.pages.layers[0].normal_(generator=generator)
    order = torch.randperm(cache.pages.num_pages, generator=generator)
    cache._free = order.tolist()
    for row in range(num_rows):
        cache.admit(row, ROOM)
    cache.written[:] = torch.randint(0, ROOM, (num_rows,), generator=generator).numpy()
    return cache


def decode_step(cache: KVCache, *rows: int) -> DecodeStep:
    return DecodeStep(cache, np.array(rows, np.int64), torch.zeros(len(rows), dtype=torch.long))


LAYERS = pytest.mark.parametrize(
    "layer",
    [
        (3, 3, 64, 64, None, None),
        (1, 1, 8, 8, None, None),
        (2, 4, 20, 13, None, None),
        (2, 7, 32, 40, None, None),
        (2, 2, 16, 96, 7, None),
        (1, 3, 33, 72, None, 5.0),
        (2, 1, 8, 8, 5, 3.0),
    ],
)
"Key-value heads, query heads for each, widths of keys and values, window, soft cap."


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


@LAYERS
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_of_a_step_is_pytorchs(compiled: Kernels, layer: tuple, threads: int) -> None:
    num_kv_heads, group, key_dim, value_dim, window, softcap = layer
    shape = LayerShape(num_kv_heads, key_dim, value_dim, torch.float32, window)
    cache, twin = filled_cache(9, shape, seed=3), filled_cache(9, shape, seed=3)
    settings = AttentionSettings(key_dim**-0.5, window, softcap)
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(9, num_kv_heads * group, key_dim, generator=generator).transpose(0, 1)
    key = torch.randn(num_kv_heads, 9, key_dim, generator=generator)
    value = torch.randn(9, num_kv_heads, value_dim, generator=generator).transpose(0, 1)
    rows = 4, 0, 8, 1, 7, 3, 2, 6, 5
    found = torch.empty(9, num_kv_heads * group, value_dim)

    expected = _decode(decode_step(twin, *rows), 0, settings, query, key, value)
    with num_threads(threads):
        compiled.decode(decode_step(cache, *rows), 0, settings, query, key, value, found)

    # 1e-5: float32 sums of up to 37 weights that add up to 1, of values about 1.
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert torch.equal(cache.pages.layers[0], twin.pages.layers[0])


def test_a_row_attends_alike_whoever_is_beside_it(compiled: Kernels) -> None:
    """To the last bit: no sum runs over rows, and no row is padded to another's length."""
    shape = LayerShape(2, 16, 16, torch.float32, None)
    settings = AttentionSettings(0.25, None, None)
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(9, 6, 16, generator=generator)
    key = torch.randn(9, 2, 16, generator=generator)
    outputs = []
    for rows in ([0, 1, 2, 3, 4, 5, 6, 7, 8], [7, 2], [2]):
        cache = filled_cache(9, shape, seed=3)
        output = torch.empty(len(rows), 6, 16)
        new_query, new_key = (x[rows].transpose(0, 1) for x in (query, key))
        compiled.decode(
            decode_step(cache, *rows), 0, settings, new_query, new_key, new_key.clone(), output
        )
        outputs.append(output[rows.index(2)])

    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_nan_reaches_only_the_row_whose_it_is(compiled: Kernels) -> None:
    """Neither its neighbours, nor a row that has taken over a page and not yet filled it."""
    shape = LayerShape(1, 8, 8, torch.float32, None)
    cache = filled_cache(3, shape, seed=1)
    cache.written[:] = 20, 20, 20
    cache.pages.layers[0][cache.table[1, 0]] = torch.nan
    for tensor in (cache.pages.keys(0, 8), cache.pages.values(0, 8).transpose(2, 3)):
        tensor[cache.table[2, 1].item(), :, :, 20 - PAGE :] = torch.nan
    new = torch.ones(1, 3, 8)
    output = torch.empty(3, 1, 8)

    step = decode_step(cache, 0, 1, 2)
    compiled.decode(step, 0, AttentionSettings(1.0, None, None), new, new, new, output)

    assert [bool(row.isnan().any()) for row in output] == [False, True, False]


@pytest.mark.parametrize(("start", "stop"), [(0, 37), (0, 1), (5, 35), (16, 33)])
@LAYERS
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_of_a_prompt_is_pytorchs(
    compiled: Kernels, layer: tuple, start: int, stop: int, threads: int
) -> None:
    """From the middle of a page to the middle of another, and nothing else is touched."""
    num_kv_heads, group, key_dim, value_dim, window, softcap = layer
    shape = LayerShape(num_kv_heads, key_dim, value_dim, torch.float32, window)
    settings = AttentionSettings(key_dim**-0.5, window, softcap)
    cache, twin = filled_cache(4, shape, seed=5), filled_cache(4, shape, seed=5)
    ids, num = tuple(range(ROOM)), stop - start
    generator = torch.Generator().manual_seed(6)
    query = torch.randn(num, num_kv_heads * group, key_dim, generator=generator).transpose(0, 1)
    key = torch.randn(num, num_kv_heads, key_dim, generator=generator).transpose(0, 1)
    value = torch.randn(num_kv_heads, num, value_dim, generator=generator)
    found = torch.empty(num, num_kv_heads * group, value_dim)

    expected = _attend_prompt(PromptSpan(twin, 2, ids, start, stop), 0, settings, query, key, value)
    with num_threads(threads):
        span = PromptSpan(cache, 2, ids, start, stop)
        compiled.prompt(span, 0, settings, query, key, value, found)

    # 1e-5: float32 sums of up to 37 weights that add up to 1, of values about 1.
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert torch.equal(cache.pages.layers[0], twin.pages.layers[0])


@pytest.mark.parametrize("window", [None, 7])
def test_a_prompt_attends_alike_in_one_go_in_two_and_token_by_token(
    compiled: Kernels, window: int | None
) -> None:
    """To the last bit: tokens of a tile have nothing in common but the page they read."""
    shape = LayerShape(2, 16, 32, torch.float32, window)
    settings = AttentionSettings(0.25, window, None)
    generator = torch.Generator().manual_seed(4)
    query, key, value = (
        torch.randn(heads, ROOM, width, generator=generator)
        for heads, width in ((6, 16), (2, 16), (2, 32))
    )
    outputs = []
    for cuts in ([0, ROOM], [0, 11, ROOM], range(ROOM + 1)):
        cache = filled_cache(1, shape, seed=3)
        output = torch.full((ROOM, 6, 32), torch.nan)
        for start, stop in pairwise(cuts):
            one = slice(start, stop)
            compiled.prompt(
                PromptSpan(cache, 0, tuple(range(ROOM)), start, stop),
                0, settings, query[:, one], key[:, one], value[:, one], output[one],
            )  # fmt: skip
        outputs.append(output)

    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("width", [1, 8, 61, 1536])
def test_the_gate_is_pytorchs(compiled: Kernels, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = 10 * torch.randn(2, 5, 2 * width, generator=generator)
    x[0, 0, 0] = -200.0
    x[0, 1, 0] = 200.0
    gate, rest = x.chunk(2, dim=-1)

    # 1e-6: two units of the last place of float32, and the products up to it.
    torch.testing.assert_close(
        compiled.gate(x), torch.nn.functional.silu(gate) * rest, atol=1e-6, rtol=1e-6
    )
    x[0, 2, 0] = torch.nan
    assert [place.tolist() for place in compiled.gate(x).isnan().nonzero()] == [[0, 2, 0]]


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
