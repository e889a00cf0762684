"""generate() and GenerateIterator: what they return, when they end, and what they let go of."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from jobs.completion import Capture
from jobs.sampling import RowSampling, SamplingDefaults
from workers.generate import GenerateIterator, generate, open_pipeline
from workers.pipeline import (
    BatchPipeline,
    CacheFullError,
    PipelineLimits,
    RowContext,
    StepOutput,
)
from workers.turns import Turns


def new_tokens(result: object, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [s[len(p) :] for s, p in zip(result.sequences, prompts, strict=True)]


def test_sequences_are_prompts_followed_by_new_tokens_in_input_order(
    succ12: BatchPipeline,
) -> None:
    result = generate(succ12, [[3, 4], [9], [1, 1, 1]], max_new_tokens=3, temperature=0)

    assert result.sequences == [[3, 4, 5, 6, 7], [9, 10, 11, 0], [1, 1, 1, 2, 3, 4]]
    assert result.logits is None
    assert result.log_probs is None
    assert result.finish_reasons == ["length", "length", "length"]


def test_an_empty_list_is_an_empty_result(succ12: BatchPipeline) -> None:
    plain = generate(succ12, [], max_new_tokens=3)
    full = generate(succ12, [], max_new_tokens=3, output_logits=True, output_logprobs=2)

    assert (plain.sequences, plain.logits, plain.log_probs) == ([], None, None)
    assert (full.sequences, full.logits, full.log_probs) == ([], [], [])


@pytest.mark.parametrize(
    "input_ids",
    [
        [[3, 4], [5, 6]],
        [(3, 4), (5, 6)],
        np.array([[3, 4], [5, 6]]),
        torch.tensor([[3, 4], [5, 6]]),
        (row for row in [[3, 4], [5, 6]]),
        [iter([3, 4]), np.array([5, 6], np.uint8)],
    ],
    ids=["lists", "tuples", "array", "tensor", "generator", "mixed"],
)
def test_rows_may_be_anything_that_holds_integers(succ12: BatchPipeline, input_ids: object) -> None:
    result = generate(succ12, input_ids, max_new_tokens=1, temperature=0)

    assert result.sequences == [[3, 4, 5], [5, 6, 7]]


def test_zeros_of_the_mask_drop_tokens_anywhere(succ12: BatchPipeline) -> None:
    result = generate(
        succ12,
        [[0, 0, 3, 4], [5, 0, 6, 0]],
        [[0, 0, 1, 1], [1, 0, 2, 0]],
        max_new_tokens=1,
        temperature=0,
    )

    assert result.sequences == [[3, 4, 5], [5, 6, 7]]


def test_a_row_ends_with_eos_and_the_others_go_on(tmp_path: object, succ12: object) -> None:
    """Case G23: one row's stop must not end the batch."""
    from tiny_models import save, successor_model

    pipeline = open_pipeline(save(successor_model(eos=9), tmp_path))

    prompts = [[1], [1, 2, 3, 4, 5, 6]]
    result = generate(pipeline, prompts, max_new_tokens=10, temperature=0)

    assert new_tokens(result, prompts) == [[2, 3, 4, 5, 6, 7, 8, 9], [7, 8, 9]]
    assert result.finish_reasons == ["stop", "stop"]


def test_stop_ids_end_a_row_and_only_new_tokens_count(succ12: BatchPipeline) -> None:
    result = generate(succ12, [[8, 3]], max_new_tokens=10, temperature=0, stop_token_ids={8, 5})

    assert result.sequences == [[8, 3, 4, 5]]
    assert result.finish_reasons == ["stop"]


def test_ids_logits_and_logprobs_are_of_one_length_and_not_shifted(
    succ12: BatchPipeline,
) -> None:
    """Case G39: row 0 of the logits is the prediction after the last prompt token."""
    result = generate(
        succ12,
        [[3, 4], [7]],
        max_new_tokens=6,
        temperature=0,
        stop_token_ids=[9],
        output_logits=True,
        output_logprobs=3,
    )

    for row, prompt in enumerate([[3, 4], [7]]):
        ids = result.sequences[row][len(prompt) :]
        assert result.logits[row].shape == (len(ids), 12)
        assert result.logits[row].argmax(axis=1).tolist() == ids
        assert result.log_probs[row].sampled_token_ids == ids
        assert len(result.log_probs[row].token_log_probabilities) == len(ids)
        assert len(result.log_probs[row].top_log_probabilities) == len(ids)
        assert all(value <= 0 for value in result.log_probs[row].token_log_probabilities)


def test_ignore_eos_runs_every_row_to_the_end(succ12: BatchPipeline) -> None:
    result = generate(
        succ12, [[3], [9]], max_new_tokens=5, temperature=0, stop_token_ids=[5], ignore_eos=True
    )

    assert [len(sequence) for sequence in result.sequences] == [6, 6]
    assert result.finish_reasons == ["length", "length"]


def test_min_new_tokens_holds_back_every_ending_id(tmp_path: object) -> None:
    """Case G19. The raw logits stay as the model made them."""
    from tiny_models import save, successor_model

    pipeline = open_pipeline(save(successor_model(eos=[8, 11]), tmp_path))

    result = generate(
        pipeline,
        [[3, 4]],
        max_new_tokens=6,
        min_new_tokens=5,
        temperature=0,
        output_logits=True,
        output_logprobs=12,
    )

    assert result.sequences == [[3, 4, 5, 6, 7, 0, 1, 2]]
    assert result.logits[0][3].argmax() == 8
    assert result.log_probs[0].top_log_probabilities[3][8] == -np.inf


def test_min_new_tokens_holds_back_stop_ids_too(succ12: BatchPipeline) -> None:
    result = generate(
        succ12, [[3, 4]], max_new_tokens=6, min_new_tokens=5, temperature=0, stop_token_ids=[8]
    )

    assert result.sequences == [[3, 4, 5, 6, 7, 0, 1, 2]]


def test_min_new_tokens_works_with_ignore_eos(succ12: BatchPipeline) -> None:
    result = generate(
        succ12,
        [[3, 4]],
        max_new_tokens=6,
        min_new_tokens=5,
        temperature=0,
        stop_token_ids=[8],
        ignore_eos=True,
    )

    assert result.sequences == [[3, 4, 5, 6, 7, 0, 1, 2]]


def test_a_long_prompt_gets_fewer_tokens_and_says_so(succ12: BatchPipeline) -> None:
    """Case G29: the model holds 64 tokens."""
    result = generate(succ12, [[1] * 63, [1] * 61], max_new_tokens=5, temperature=0)

    assert [len(sequence) for sequence in result.sequences] == [64, 64]
    assert result.finish_reasons == ["length", "length"]


def test_eos_is_gathered_from_all_places(tmp_path: object) -> None:
    """Case G21: config, generation config and tokenizer may each name another."""
    import json

    from tiny_models import byte_tokenizer, save, table_model

    following = [(i + 1) % 257 for i in range(257)]
    folder = save(table_model(following, eos=[11, 7]), tmp_path, tokenizer=byte_tokenizer())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))

    pipeline = open_pipeline(folder)

    assert pipeline.eos_token_ids == {7, 9, 11, 256}
    result = generate(pipeline, [[3, 4]], max_new_tokens=10, temperature=0)
    assert result.sequences == [[3, 4, 5, 6, 7]]
    assert result.finish_reasons == ["stop"]


def test_batched_rows_equal_rows_alone_with_absolute_positions(models: dict[str, str]) -> None:
    """Case G02: padding that shifts positions flips the first token from 18 to 32."""
    pipeline = open_pipeline(models["positions"])
    prompts = [[5, 9, 11], [7, 3, 22, 41, 8, 30, 12, 19]]

    both = generate(pipeline, prompts, max_new_tokens=6, temperature=0, output_logits=True)
    alone = [
        generate(pipeline, [p], max_new_tokens=6, temperature=0, output_logits=True)
        for p in prompts
    ]

    assert both.sequences == [result.sequences[0] for result in alone]
    for row in (0, 1):
        # 1e-4: float32 sums over 32 channels, grouped differently by the number of rows.
        np.testing.assert_allclose(both.logits[row], alone[row].logits[0], atol=1e-4)
    if torch.__version__.startswith("2.13"):  # Random weights differ between releases.
        assert new_tokens(both, prompts) == [[18, 2, 32, 32, 15, 2], [38, 58, 58, 2, 58, 2]]


def test_logits_and_logprobs_are_raw_whatever_the_temperature(const5: BatchPipeline) -> None:
    """Case G36."""
    result = generate(
        const5,
        [[0]],
        max_new_tokens=1,
        temperature=0.5,
        top_k=1,
        seed=1,
        output_logits=True,
        output_logprobs=5,
    )

    np.testing.assert_allclose(result.logits[0], [[2, 1, 0, -1, -2]], atol=1e-6)
    top = result.log_probs[0].top_log_probabilities[0]
    assert list(top) == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(
        list(top.values()), [-0.45191, -1.45191, -2.45191, -3.45191, -4.45191], atol=1e-5
    )


def test_the_sampled_token_joins_the_alternatives_if_it_is_not_of_them(
    const5: BatchPipeline,
) -> None:
    result = generate(const5, [[0]] * 8, max_new_tokens=8, temperature=2, output_logprobs=1)

    for log_probs in result.log_probs:
        for token_id, top, logprob in zip(
            log_probs.sampled_token_ids,
            log_probs.top_log_probabilities,
            log_probs.token_log_probabilities,
            strict=True,
        ):
            assert list(top) == ([0] if token_id == 0 else [0, token_id])
            assert top[token_id] == logprob


def test_logprobs_of_the_chosen_tokens_alone(const5: BatchPipeline) -> None:
    result = generate(const5, [[0]], max_new_tokens=2, temperature=0, output_logprobs="chosen")

    assert result.log_probs[0].token_log_probabilities == pytest.approx([-0.45191] * 2, abs=1e-5)
    assert [list(top) for top in result.log_probs[0].top_log_probabilities] == [[0], [0]]


def test_steps_yield_the_tokens_of_live_rows(succ12: BatchPipeline) -> None:
    with GenerateIterator(
        succ12, [[3], [9]], max_new_tokens=3, temperature=0, stop_token_ids=[11]
    ) as batch:
        assert batch.synchronous
        assert not batch.done
        assert batch.sequences == [[3], [9]]
        assert batch.step() == {0: [4], 1: [10]}
        assert batch.step() == {0: [5], 1: [11]}
        assert batch.finish_reasons == [None, "stop"]
        assert list(batch) == [{0: [6]}]
        assert batch.done
        with pytest.raises(RuntimeError, match="no live rows"):
            batch.step()


def test_logits_and_logprobs_can_be_read_while_it_runs(succ12: BatchPipeline) -> None:
    with GenerateIterator(
        succ12, [[3], [9]], max_new_tokens=3, output_logits=True, output_logprobs=1
    ) as batch:
        assert [logits.shape for logits in batch.logits] == [(0, 12), (0, 12)]
        batch.step()
        assert [logits.shape for logits in batch.logits] == [(1, 12), (1, 12)]
        assert [len(lp.sampled_token_ids) for lp in batch.log_probs] == [1, 1]


def test_what_is_not_recorded_cannot_be_read(succ12: BatchPipeline) -> None:
    with GenerateIterator(succ12, [[3]], max_new_tokens=3) as batch:
        with pytest.raises(RuntimeError, match="records no logits"):
            _ = batch.logits
        with pytest.raises(RuntimeError, match="records no log-probabilities"):
            _ = batch.log_probs


def test_a_removed_row_ends_and_changes_no_other(const5: BatchPipeline) -> None:
    prompts = [[0], [1], [2]]
    whole = generate(const5, prompts, max_new_tokens=6, seed=5)
    with GenerateIterator(const5, prompts, max_new_tokens=6, seed=5) as batch:
        batch.step()
        batch.remove(1)
        batch.remove(1)
        for row in (-1, 3):
            with pytest.raises(IndexError, match="out of range for 3 rows"):
                batch.remove(row)
        assert sorted(batch.step()) == [0, 2]
        for _ in batch:
            pass

    assert batch.finish_reasons == ["length", "abort", "length"]
    assert len(batch.sequences[1]) == 2
    assert batch.sequences[0] == whole.sequences[0]
    assert batch.sequences[2] == whole.sequences[2]


def test_a_row_can_be_removed_before_the_first_step(const5: BatchPipeline) -> None:
    with GenerateIterator(const5, [[0], [1], [2]], max_new_tokens=2, seed=5) as batch:
        batch.remove(0)
        assert sorted(batch.step()) == [1, 2]


def test_close_releases_everything_and_may_be_called_twice(const5: BatchPipeline) -> None:
    batch = GenerateIterator(const5, [[0], [1]], max_new_tokens=2)
    assert const5.num_open_rows == 2

    batch.close()
    batch.close()

    assert const5.num_open_rows == 0
    assert batch.done
    assert batch.finish_reasons == ["abort", "abort"]
    with pytest.raises(RuntimeError):
        batch.step()


def test_finished_rows_are_released_before_step_returns(succ12: BatchPipeline) -> None:
    with GenerateIterator(succ12, [[3], [9]], max_new_tokens=3, stop_token_ids=[10], top_k=1) as b:
        b.step()
        assert succ12.num_open_rows == 1


def test_two_batches_can_be_open_at_once(succ12: BatchPipeline) -> None:
    first = GenerateIterator(succ12, [[3]], max_new_tokens=2, temperature=0)
    second = GenerateIterator(succ12, [[7]], max_new_tokens=2, temperature=0)

    assert [first.step(), second.step(), first.step(), second.step()] == [
        {0: [4]}, {0: [8]}, {0: [5]}, {0: [9]},
    ]  # fmt: skip


def test_open_batches_fill_the_cache(const5: BatchPipeline) -> None:
    with GenerateIterator(const5, [[0]] * 6, max_new_tokens=2):
        with pytest.raises(CacheFullError, match="3 rows do not fit beside the 6"):
            GenerateIterator(const5, [[0]] * 3, max_new_tokens=2)
        assert const5.num_open_rows == 6
    assert const5.num_open_rows == 0


def test_a_claim_that_fails_half_way_holds_nothing(
    succ12: BatchPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.model.kv_cache import Pages

    def refuse(*_: object) -> None:
        raise MemoryError("no room for the first layer")

    monkeypatch.setattr(Pages, "allocate", refuse)
    with pytest.raises(MemoryError):
        GenerateIterator(succ12, [[1] * 40, [1] * 40, [1]], max_new_tokens=2)

    assert succ12.num_open_rows == 0


def test_rows_of_contexts_have_their_own_sampling_seed_and_stops(const5: BatchPipeline) -> None:
    contexts = [
        RowContext((0,), RowSampling(max_new_tokens=3, temperature=0.0), 0),
        RowContext((0,), RowSampling(max_new_tokens=5, stop_token_ids=frozenset([0])), 9),
        RowContext((0, 0), RowSampling(max_new_tokens=2, repetition_penalty=9.0, top_k=1), 0),
    ]
    with GenerateIterator.from_contexts(const5, contexts, capture=Capture(logprobs=0)) as batch:
        for _ in batch:
            pass
    alone = generate(const5, [[0]], max_new_tokens=5, stop_token_ids=[0], seed=9)

    assert batch.sequences[0] == [0, 0, 0, 0]
    assert batch.sequences[1] == alone.sequences[0]
    assert batch.sequences[2][2] == 1
    assert [len(lp.token_log_probabilities) for lp in batch.log_probs] == [
        len(sequence) - len(context.token_ids)
        for sequence, context in zip(batch.sequences, contexts, strict=True)
    ]


def test_the_stop_reason_is_the_stop_id_and_nothing_for_eos(tmp_path: object) -> None:
    from tiny_models import save, successor_model

    pipeline = open_pipeline(save(successor_model(eos=9), tmp_path))
    with GenerateIterator(
        pipeline, [[3], [7], [0]], max_new_tokens=4, temperature=0, stop_token_ids=[5]
    ) as batch:
        for _ in batch:
            pass
        assert batch.finish_reasons == ["stop", "stop", "length"]
        assert [batch.stop_reason(row) for row in range(3)] == ["5", None, None]


class LateBatch:
    """A batch that counts upwards, and hands out each step's tokens one call late."""

    def __init__(self, pipeline: "LatePipeline", contexts: Sequence[RowContext]) -> None:
        self._pipeline = pipeline
        self._last = {row: context.token_ids[-1] for row, context in enumerate(contexts)}
        self._held: dict[int, int] = {}

    def execute(self) -> StepOutput:
        held, self._held = self._held, {}
        for row in self._last:
            self._last[row] += 1
            self._held[row] = self._last[row]
        return StepOutput(
            rows=np.array(list(held), np.int64),
            token_ids=np.array(list(held.values()), np.int64),
            has_nan=np.zeros(len(held), np.bool_),
        )

    def release(self, row: int) -> None:
        del self._last[row]
        self._pipeline.num_open_rows -= 1


class LatePipeline:
    """A pipeline that overlaps its steps."""

    is_text_generator = True
    applies_penalties = False
    is_speculative = False
    overlap_active = True
    graph_capture_ready = False
    data_parallel_degree = 1
    vocab_size = 100
    eos_token_ids = frozenset([50])
    sampling_defaults = SamplingDefaults()
    limits = PipelineLimits(8, 64, 512)
    num_open_rows = 0

    def claim(
        self, contexts: Sequence[RowContext], capture: Capture, turns: Turns | None = None
    ) -> LateBatch:
        self.num_open_rows += len(contexts)
        return LateBatch(self, contexts)


def test_an_overlapping_pipeline_brings_the_same_tokens_one_call_late() -> None:
    pipeline = LatePipeline()
    with GenerateIterator(pipeline, [[1], [48]], max_new_tokens=3) as batch:
        assert not batch.synchronous
        assert list(batch) == [{}, {0: [2], 1: [49]}, {0: [3], 1: [50]}, {0: [4]}]
    assert batch.finish_reasons == ["length", "stop"]
    assert pipeline.num_open_rows == 0


class ShortBatch:
    """A batch whose pipeline forgets its log-probabilities."""

    def execute(self) -> StepOutput:
        rows = np.arange(2)
        return StepOutput(rows, rows, np.zeros(2, np.bool_), np.zeros(1, np.float32))

    def release(self, row: int) -> None:
        pass


class ShortPipeline(LatePipeline):
    overlap_active = False

    def claim(
        self, contexts: Sequence[RowContext], capture: Capture, turns: Turns | None = None
    ) -> ShortBatch:
        return ShortBatch()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"output_logprobs": "chosen"}, "1 log-probabilities for 2 rows"),
        ({"output_logits": True}, "0 rows of logits for 2 rows"),
    ],
)
def test_numbers_that_do_not_line_up_are_an_error_never_a_cut(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        generate(ShortPipeline(), [[1], [2]], max_new_tokens=3, **settings)


def test_a_row_whose_logits_are_no_numbers_costs_no_other(tmp_path: object) -> None:
    from tiny_models import save, successor_model

    model = successor_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[10] = torch.nan
    pipeline = open_pipeline(save(model, tmp_path))

    result = generate(pipeline, [[8], [3], [1]], max_new_tokens=4, temperature=0, output_logprobs=1)

    assert result.finish_reasons == ["error", "length", "length"]
    assert result.sequences == [[8, 9, 10], [3, 4, 5, 6, 7], [1, 2, 3, 4, 5]]
