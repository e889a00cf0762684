"""A GPU's forward pass, run on a CPU: places in the cache, bounds of rows, turns, pads of graphs.

What only a GPU can show, the kernels and the capture itself, is gpu_check.py's.
"""

import gc
import logging
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from test_ragged import RUN, SIZES, alone, make_config
from tiny_models import random_model, successor_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from varlen import grouped_varlen, plain_varlen, replay_by_running

from jobs.model import ModelFacts
from jobs.sampling import RowSampling, SamplingDefaults
from workers.generate import GenerateIterator, generate
from workers.model import flash as flash_module
from workers.model import slotted as slotted_module
from workers.model.flash import Flash, find_flash
from workers.model.graphs import DecodeGraphs, ladder, pad_rows
from workers.model.opening import open_slotted, prove_slotted
from workers.model.shape import LayerShape
from workers.model.slots import SlotCache
from workers.model.slotted import SlottedForward, SlottedModel, find_best
from workers.pipeline import CacheFullError, PipelineLimits, RowContext
from workers.turns import Turns

KINDS = {"plain": None, "PyTorch 2.11": plain_varlen, "PyTorch 2.13": grouped_varlen}


@pytest.fixture(autouse=True)
def flash_runs_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are compared to 1e-4, which half precision does not keep."""
    monkeypatch.setattr(flash_module, "_HALF", (torch.float32,))


def make_slotted(
    model: PreTrainedModel,
    function: Callable[..., torch.Tensor] | None = None,
    *,
    capacity: int = 400,
    max_rows: int = 8,
) -> SlottedModel:
    flash, shapes = prove_slotted(model, None if function is None else Flash(function))
    assert (flash is None) == (function is None), "flash attention did not pass the proof"
    cache = SlotCache(capacity, max_rows, model.device)
    return SlottedModel(model, cache, flash, shapes, max_length=128, max_rows=max_rows)


def captured(slotted: SlottedModel) -> SlottedModel:
    with torch.inference_mode():
        assert slotted._graphs.capture(replay_by_running)
    return slotted


def contexts_of(rows: Sequence[Sequence[int]], num_fed: int) -> list[RowContext]:
    return [
        RowContext(tuple(row[: len(row) - num_fed]), RowSampling(num_fed + 1), 0) for row in rows
    ]


def check_steps(
    slotted: SlottedModel,
    rows: list[list[int]],
    expected: list[torch.Tensor],
    *,
    num_fed: int,
    max_live: int,
    ends: dict[int, int] | None = None,
) -> None:
    """Feeds each row's last tokens one at a time; a row that has ended makes room for the next."""
    waiting, fed = list(range(len(rows))), dict.fromkeys(range(len(rows)), 0)
    ends = ends or {}
    with torch.inference_mode():
        forward = SlottedForward(
            slotted,
            contexts_of(rows, num_fed),
            turns=None if max_live >= len(rows) else Turns(max_live, max_tokens=999),
        )
        live: set[int] = set()
        while live or waiting:
            arriving = [waiting.pop(0) for _ in range(min(len(waiting), max_live - len(live)))]
            if arriving:
                forward.admit(arriving)
                live |= set(arriving)
            ran, logits = forward.next_logits()
            assert sorted(ran.tolist()) == sorted(live)
            best = forward.best_ids()
            for row, found, best_id in zip(ran.tolist(), logits, best, strict=True):
                wanted = expected[row][len(rows[row]) - 1 - num_fed + fed[row]]
                # 1e-4: float32 sums over 32 channels; logits spread by 1 to 2.
                torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
                assert int(best_id) == int(found.argmax())
                fed[row] += 1
            done = [row for row in ran.tolist() if fed[row] > ends.get(row, num_fed)]
            for row in done:
                forward.release(row)
                live.discard(row)
            going = np.array(sorted(live), np.int64)
            forward.append(
                going, np.array([rows[r][len(rows[r]) - num_fed - 1 + fed[r]] for r in going])
            )
    assert fed == {row: ends.get(row, num_fed) + 1 for row in range(len(rows))}


def random_rows(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 63, (k,), generator=generator).tolist() for k in lengths]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RUN)
def test_rows_of_a_batch_equal_rows_alone(name: str, kind: str) -> None:
    """Prefill and decode, windows shorter than the rows, rows that end before others."""
    model = random_model(make_config(name, RUN[name]))
    rows = random_rows(23, 9, 40, 5, 24)
    expected = alone(model, rows)
    slotted = make_slotted(model, KINDS[kind])

    check_steps(slotted, rows, expected, num_fed=4, max_live=5, ends={0: 1, 3: 2})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens_per_pass", [10, 1000])
@pytest.mark.parametrize("name", ["Llama", "Mistral with a window"])
def test_what_prompts_share_is_run_once_and_nothing_changes(
    name: str, tokens_per_pass: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In passes that cut prompts, so that later stretches look back on what is stored."""
    monkeypatch.setattr(slotted_module, "_TOKENS_PER_PASS", tokens_per_pass)
    model = random_model(make_config(name, RUN[name]))
    shared, *tails = random_rows(21, 4, 17, 5, 30)
    rows = [shared + tail for tail in tails]
    expected = alone(model, rows)
    slotted = make_slotted(model, KINDS[kind])
    run, passes = slotted.prefill, []
    slotted.prefill = lambda taken: passes.append(sum(s.num_tokens for s in taken)) or run(taken)

    check_steps(slotted, rows, expected, num_fed=3, max_live=4)

    assert sum(passes) == len(shared) + sum(len(tail) - 3 for tail in tails)
    assert max(passes) <= tokens_per_pass


@pytest.mark.parametrize("kind", KINDS)
def test_rows_take_turns_in_the_places_of_those_that_have_ended(kind: str) -> None:
    """Seven rows in three places, the later ones longer than what stood there before."""
    model = random_model(make_config("Llama", SIZES))
    rows = random_rows(9, 6, 12, 20, 7, 33, 8)
    expected = alone(model, rows)
    slotted = make_slotted(model, KINDS[kind], capacity=3 * 34)

    check_steps(slotted, rows, expected, num_fed=3, max_live=3, ends={0: 1, 2: 0, 4: 1})

    assert slotted.cache.claim(3 * 34) == 0, "the batch has not given back its room"


@pytest.mark.parametrize("name", ["Llama", "Mistral with a window", "GPT2"])
def test_steps_filled_up_with_pads_change_no_row(name: str) -> None:
    """Graphs of 1, 2, 4 and 5 rows: three live rows run as four, and alone as one."""
    model = random_model(make_config(name, RUN[name]))
    rows = random_rows(23, 9, 40, 5, 24)
    expected = alone(model, rows)
    slotted = captured(make_slotted(model, plain_varlen, max_rows=5))
    replay, sizes = slotted._graphs._replays, []
    for size, launch in list(replay.items()):
        replay[size] = lambda size=size, launch=launch: (sizes.append(size), launch())

    check_steps(slotted, rows, expected, num_fed=4, max_live=5, ends={0: 1, 3: 1, 1: 2, 4: 2})

    assert sizes == [5, 4, 1, 1]


def test_a_step_that_cannot_be_captured_is_run_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without flash attention a step must know its longest row, which a graph does not."""
    model = random_model(make_config("Llama", SIZES))
    rows = random_rows(9, 6)
    expected = alone(model, rows)
    slotted = make_slotted(model)

    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        is_captured = slotted._graphs.capture(replay_by_running)

    assert not is_captured
    [record] = caplog.records
    assert record.getMessage() == (
        "decode steps run without captured graphs, which is slower: its attention needs to know "
        "the longest row"
    )
    check_steps(slotted, rows, expected, num_fed=3, max_live=2)


READS = {"item", "is_nonzero", "_local_scalar_dense", "nonzero", "equal"}


class NoReads(TorchDispatchMode):
    """Fails where a value of a tensor is asked for, as a capture would."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = [x for x in args[1] if x is not None] if name == "index" else []
        assert name not in READS and all(x.dtype != torch.bool for x in masks), f"{name} reads"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3Text with a window", "GPT2"])
def test_a_decode_step_reads_no_value(name: str) -> None:
    """A GPU would stop for each, and no graph could be captured."""
    model = random_model(make_config(name, RUN[name]))

    def blind_varlen(query: torch.Tensor, *args: object, scale: float, **kwargs: object):
        return torch.zeros_like(query)

    cache = SlotCache(100, 4, model.device)
    model.set_attn_implementation("batchwright_ragged")
    slotted = SlottedModel(model, cache, Flash(blind_varlen), {}, max_length=50, max_rows=4)
    rows = torch.tensor([[5, 6, 7], [3, 9, 1], [0, 20, 60]])

    with torch.inference_mode(), NoReads():
        logits, best = slotted._run_decode(rows)
        with pytest.raises(AssertionError, match="item reads"):
            int(best[0])

    assert logits.shape == (3, 64)


def test_what_a_row_of_nan_leaves_behind_reaches_no_other_row() -> None:
    """Neither its neighbours nor the row that takes its place, which is shorter."""
    model = random_model(make_config("Llama", SIZES))
    rows = random_rows(12, 20, 4, 5)
    rows[1][3] = 63
    with torch.no_grad():
        model.model.embed_tokens.weight[63] = torch.nan
    slotted = make_slotted(model)

    with torch.inference_mode():
        forward = SlottedForward(slotted, contexts_of(rows, 0), turns=Turns(3, max_tokens=999))
        forward.admit([0, 1, 2])
        live, logits = forward.next_logits()
        assert {int(row) for row, z in zip(live, logits, strict=True) if z.isnan().any()} == {1}
        assert {int(r) for r, b in zip(live, forward.best_ids(), strict=True) if b < 0} == {1}
        forward.release(1)
        forward.append(np.array([0, 2]), np.array([5, 5]))
        forward.admit([3])
        live, logits = forward.next_logits()

    assert sorted(live.tolist()) == [0, 2, 3]
    assert logits.isfinite().all()


def test_room_is_claimed_where_it_is_free_and_given_back() -> None:
    cache = SlotCache(100, 4, torch.device("cpu"))

    assert [cache.claim(40), cache.claim(30), cache.claim(30)] == [0, 40, 70]
    with pytest.raises(CacheFullError, match=r"1 tokens do not fit into a cache of 100 beside"):
        cache.claim(1)
    cache.release(40)
    assert cache.claim(20) == 40
    assert cache.claim(10) == 60


def test_a_batch_that_can_never_fit_is_out_of_memory() -> None:
    with pytest.raises(MemoryError, match=r"101 tokens do not fit into a cache of 100"):
        SlotCache(100, 4, torch.device("cpu")).claim(101)


def test_pads_stand_behind_the_rows_and_share_no_place() -> None:
    cache = SlotCache(100, 4, torch.device("cpu"))
    cache.allocate(0, LayerShape(2, 8, 8, torch.float32, None))

    padded = pad_rows(np.array([[5], [3], [90]]), 4, cache.pads_start)

    assert padded.tolist() == [[5, 0, 0, 0], [3, 0, 0, 0], [90, 100, 101, 102]]
    assert len(cache.keys[0]) == 104


@pytest.mark.parametrize("most", [1, 2, 3, 8, 64, 65, 300, 1024])
def test_the_ladder_has_a_size_for_every_batch(most: int) -> None:
    sizes = ladder(most)

    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    for num_rows in range(1, most + 1):
        size = next(size for size in sizes if size >= num_rows)
        assert size - num_rows <= max(7, num_rows // 4)


def test_the_best_id_is_the_lowest_of_equals_and_none_where_there_is_no_number() -> None:
    z = torch.tensor([[1.0, 3, 3, 2], [1, torch.nan, 5, 0], [0, torch.inf, 1, 1], [-1, -1, -1, -1]])

    assert find_best(z).tolist() == [1, -1, -1, 0]


def test_flash_attention_is_a_gpus() -> None:
    assert find_flash(torch.device("cpu")) is None


def test_flash_attention_that_computes_something_else_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def wrong(query: torch.Tensor, *args: object, scale: float, **kwargs: object) -> torch.Tensor:
        return torch.zeros_like(query)

    with caplog.at_level(logging.WARNING):
        flash, shapes = prove_slotted(random_model(make_config("Llama", SIZES)), Flash(wrong))

    assert flash is None and len(shapes) == 3
    assert "flash attention is not used, which is slower: LlamaForCausalLM" in caplog.text


FACTS = ModelFacts("Llama", 12, 64, (), SamplingDefaults(), has_tokenizer=False, dtype="float32")
LIMITS = PipelineLimits(max_batch_size=4, max_length=64, max_prefill_tokens=256)


def test_a_pipeline_of_slots_generates() -> None:
    pipeline = open_slotted(successor_model(), FACTS, LIMITS)

    result = generate(pipeline, [[3], [10, 11], [5]], max_new_tokens=4, temperature=0)

    assert result.sequences == [[3, 4, 5, 6, 7], [10, 11, 0, 1, 2, 3], [5, 6, 7, 8, 9]]
    assert pipeline.num_open_rows == 0


@pytest.mark.parametrize(
    "asked",
    [
        {"output_logprobs": 2},
        {"output_logits": True},
        {"repetition_penalty": 1.0000001},
        {"min_new_tokens": 4},
        {"temperature": 1e-3, "top_k": 2},
    ],
)
def test_the_best_ids_of_the_forward_pass_are_those_the_sampler_finds(asked: dict) -> None:
    """What is asked for makes the sampler look at the logits itself; row 1 becomes no number."""
    model = successor_model(eos=9)
    with torch.no_grad():
        model.model.embed_tokens.weight[11] = torch.nan
    facts = ModelFacts("Llama", 12, 64, (9,), SamplingDefaults(), has_tokenizer=False, dtype="f")
    pipeline = open_slotted(model, facts, LIMITS)
    rows = [[3], [10], [2, 4]]

    quick = generate(pipeline, rows, max_new_tokens=5, temperature=0)
    slow = generate(pipeline, rows, max_new_tokens=5, **{"temperature": 0} | asked)

    assert quick.sequences == slow.sequences
    assert quick.finish_reasons == slow.finish_reasons == ["length", "error", "stop"]


def test_a_batch_that_is_dropped_half_way_gives_back_its_room() -> None:
    """Most of its rows were never admitted. The cache has room for one such batch, not for two."""
    pipeline = open_slotted(successor_model(), FACTS, LIMITS)
    contexts = [RowContext((3,), RowSampling(60), 0)] * 40
    for _ in range(5):
        batch = GenerateIterator.from_contexts(pipeline, contexts, turns=Turns(4, 1000))
        batch.advance()
        batch.close()
        gc.collect()

    assert pipeline.num_open_rows == 0


def test_graphs_are_ready_when_they_are_captured_and_not_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipeline = open_slotted(successor_model(), FACTS, LIMITS)
    assert pipeline.graph_capture_ready is False

    with caplog.at_level(logging.WARNING):
        pipeline.warmup_graph_capture()

    assert "graphs are captured on a GPU, not on cpu" in caplog.text
    assert pipeline.graph_capture_ready is False
    pipeline._capture_graphs = lambda: True
    pipeline.warmup_graph_capture()
    assert pipeline.graph_capture_ready is True


def test_graphs_of_some_sizes_are_none() -> None:
    """The smallest fails: what was captured before it is let go."""

    def run(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if rows.shape[1] == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(rows.shape[1], 5), torch.zeros(rows.shape[1], dtype=torch.long)

    graphs = DecodeGraphs(run, 4, 100, torch.device("cpu"))

    assert graphs.capture(replay_by_running) is False
    assert not graphs.is_ready and not graphs._replays


def test_the_last_row_gives_back_the_room_while_the_batch_is_still_held() -> None:
    slotted = make_slotted(random_model(make_config("Llama", SIZES)), capacity=30)
    forward = SlottedForward(slotted, contexts_of(random_rows(12, 13), 2))
    forward.admit([0, 1])

    forward.release(1)
    with pytest.raises(CacheFullError):
        slotted.cache.claim(30)
    forward.release(0)

    assert slotted.cache.claim(30) == 0
