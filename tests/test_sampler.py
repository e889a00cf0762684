"""The sampler: penalties, filters and draws, on logits that can be reckoned by hand."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny_models import constant_model, save

from jobs.completion import Capture
from jobs.sampling import RowSampling
from workers.generate import generate, open_pipeline
from workers.model.filters import Filters
from workers.model.philox import uniform
from workers.model.readout import best_sorted
from workers.model.sampling import Sampler
from workers.pipeline import BatchPipeline, RowContext

FIVE = [2.0, 1.0, 0.0, -1.0, -2.0]


def draw_many(
    logits: Sequence[float], num_draws: int, *, capture: Capture | None = None, **sampling: object
) -> np.ndarray:
    """One token for each of many rows with seeds of their own."""
    rows = RowSampling(max_new_tokens=1, **sampling)
    sampler = Sampler(
        [RowContext((0,), rows, seed << 32) for seed in range(num_draws)],
        capture or Capture(),
        vocab_size=len(logits),
        eos_token_ids=frozenset(),
        device=torch.device("cpu"),
    )
    raw = torch.tensor(logits).repeat(num_draws, 1)
    return sampler.draw(raw, np.arange(num_draws)).token_ids


@pytest.mark.parametrize("top_k", [-1, 5, 50_000])
def test_top_k_that_is_off_keeps_every_token(top_k: int) -> None:
    """Case G11: shares of softmax at temperature 2."""
    token_ids = draw_many(FIVE, 4000, temperature=2.0, top_k=top_k)

    shares = np.bincount(token_ids, minlength=5) / 4000
    # Standard error of a share of 4,000 draws is at most 0.008.
    np.testing.assert_allclose(shares, [0.429, 0.260, 0.158, 0.096, 0.058], atol=0.035)


def test_top_k_1_is_greedy() -> None:
    assert set(draw_many(FIVE, 200, top_k=1, temperature=2.0)) == {0}


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.0, {0}),
        (0.6, {0}),
        (0.64, {0, 1}),
        (0.87, {0, 1}),
        (0.88, {0, 1, 2}),
        (1.0, {0, 1, 2, 3, 4}),
    ],
)
def test_top_p_keeps_the_smallest_prefix_that_reaches_it(top_p: float, kept: set[int]) -> None:
    """Case G14: probabilities are .636 .234 .086 .032 .012."""
    assert set(draw_many(FIVE, 2000, top_p=top_p)) == kept


@pytest.mark.parametrize(
    ("min_p", "kept"), [(0.0, {0, 1, 2, 3, 4}), (0.1, {0, 1, 2}), (0.4, {0}), (1.0, {0})]
)
def test_min_p_keeps_what_is_near_the_best(min_p: float, kept: set[int]) -> None:
    """Relative to the best: 1 .368 .135 .050 .018. MAX ignores it on a CPU."""
    assert set(draw_many(FIVE, 2000, min_p=min_p)) == kept


def test_top_p_works_on_what_top_k_kept_and_min_p_on_what_top_p_kept() -> None:
    # Of the best two, shares are .731 and .269: 0.7 keeps one of two, but two of five.
    assert set(draw_many(FIVE, 500, top_k=2, top_p=0.7)) == {0}
    assert set(draw_many(FIVE, 500, top_p=0.7)) == {0, 1}
    assert set(draw_many(FIVE, 500, top_p=0.95, min_p=0.2)) == {0, 1}


def test_shares_after_filters_are_renormalised() -> None:
    token_ids = draw_many(FIVE, 4000, top_p=0.88)

    shares = np.bincount(token_ids, minlength=5)[:3] / 4000
    np.testing.assert_allclose(shares, np.array([0.636, 0.234, 0.086]) / 0.957, atol=0.035)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-38])
def test_tiny_temperatures_are_greedy_and_make_no_nan(
    tmp_path: object, dtype: torch.dtype, temperature: float
) -> None:
    """Case G10: 30 / 1e-4 overflows in float16, and 30 / 1e-38 in float32."""
    folder = save(constant_model([30, 29, 0, 0, 0], dtype=dtype), tmp_path)
    pipeline = open_pipeline(folder, dtype=str(dtype).removeprefix("torch."))

    result = generate(
        pipeline, [[1]] * 4, max_new_tokens=4, temperature=temperature, seed=1,
        output_logits=True, output_logprobs=5,
    )  # fmt: skip

    assert [sequence[1:] for sequence in result.sequences] == [[0, 0, 0, 0]] * 4
    assert np.isfinite(result.logits).all()
    for log_probs in result.log_probs:
        assert all(np.isfinite(list(top.values())).all() for top in log_probs.top_log_probabilities)


def test_of_equal_logits_the_lowest_id_wins(tmp_path: object) -> None:
    """Case G35: in bfloat16 both are 17.0, and log-probabilities are still float32."""
    results = {}
    for name in ("float32", "bfloat16"):
        model = constant_model([17.03, 17.05, 3], dtype=getattr(torch, name))
        pipeline = open_pipeline(save(model, tmp_path / name), dtype=name)
        results[name] = generate(
            pipeline, [[2]], max_new_tokens=1, temperature=0, output_logprobs=3
        )

    assert [r.sequences[0][1] for r in results.values()] == [1, 0]
    tops = {name: r.log_probs[0].top_log_probabilities[0] for name, r in results.items()}
    # 3e-6: float32 keeps seven digits of 17.03.
    assert [tops["float32"][i] for i in (0, 1, 2)] == pytest.approx(
        [-0.7032, -0.6832, -14.7332], abs=1e-4
    )
    assert sum(np.exp(list(tops["bfloat16"].values()))) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("logits", "prompt", "penalty", "tokens"),
    [
        (FIVE, [0, 3, 3], 2.5, [1, 0, 0, 0]),
        (FIVE, [3], 2.5, [0, 1, 0, 0]),
        ([-1.0, -1.2, -3.0, -4.0, -5.0], [0], 2.0, [1, 0, 0]),
    ],
    ids=["prompt-counts", "answer-counts", "negative-logits"],
)
def test_repetition_penalty_counts_prompt_and_answer(
    tmp_path: object, logits: list[float], prompt: list[int], penalty: float, tokens: list[int]
) -> None:
    """Cases G05 and G06."""
    pipeline = open_pipeline(save(constant_model(logits), tmp_path))

    result = generate(
        pipeline, [prompt], max_new_tokens=len(tokens), temperature=0, repetition_penalty=penalty
    )

    assert result.sequences[0][len(prompt) :] == tokens


def test_frequency_and_presence_penalties_count_the_answer_alone(const5: BatchPipeline) -> None:
    # Logits 2 1 0: each use of a token costs 0.6, so 0 0 1 0 ... ; presence costs 1.5 once.
    frequency = generate(const5, [[0, 0]], max_new_tokens=5, temperature=0, frequency_penalty=0.6)
    presence = generate(const5, [[0, 0]], max_new_tokens=4, temperature=0, presence_penalty=1.5)

    assert frequency.sequences[0][2:] == [0, 0, 1, 0, 1]
    assert presence.sequences[0][2:] == [0, 1, 0, 0]


def test_logprobs_are_of_the_penalised_distribution_and_logits_are_not(
    const5: BatchPipeline,
) -> None:
    result = generate(
        const5, [[0]], max_new_tokens=1, temperature=0, repetition_penalty=4.0,
        output_logits=True, output_logprobs=5,
    )  # fmt: skip

    np.testing.assert_allclose(result.logits[0][0], FIVE, atol=1e-6)
    penalised = np.array([0.5, 1, 0, -1, -2])
    expected = penalised - np.log(np.exp(penalised).sum())
    top = result.log_probs[0].top_log_probabilities[0]
    np.testing.assert_allclose([top[i] for i in range(5)], expected, atol=1e-6)


def test_a_rows_draws_do_not_depend_on_its_batch(const5: BatchPipeline) -> None:
    """Case G16: batches of 1, 3 and 8, and the rows reversed."""
    from workers.generate import GenerateIterator

    prompts = [tuple(range(i % 5 + 1)) for i in range(8)]
    contexts = [RowContext(p, RowSampling(16), 42 + i * 2**32) for i, p in enumerate(prompts)]

    def run(rows: list[int]) -> dict[int, list[int]]:
        batch = GenerateIterator.from_contexts(const5, [contexts[row] for row in rows])
        with batch:
            for _ in batch:
                pass
        return dict(zip(rows, batch.sequences, strict=True))

    whole = run(list(range(8)))
    assert run(list(range(7, -1, -1))) == whole
    for size in (1, 3):
        pieces = [run(list(range(i, min(i + size, 8)))) for i in range(0, 8, size)]
        assert {row: s for piece in pieces for row, s in piece.items()} == whole
    assert len({tuple(s[len(prompts[r]) :]) for r, s in whole.items()}) == 8


def test_a_draw_beyond_the_first_candidates_is_found() -> None:
    """With top_k off the best 256 are sorted first; flat logits put most draws beyond them."""
    logits = torch.linspace(1, 0, 5000).tolist()

    token_ids = draw_many(logits, 400, temperature=2.0)

    expected = np.exp(np.array(logits) / 2)
    expected /= expected.sum()
    assert (token_ids > 256).mean() > 0.8
    # The standard error of the mean id is 1443 / sqrt(400) = 72.
    assert abs(token_ids.mean() - (expected * np.arange(5000)).sum()) < 300


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"min_p": 0.62}, {"top_p": 0.05}])
def test_looking_at_few_candidates_first_changes_no_draw(filters: dict[str, float]) -> None:
    """The same walk over all candidates at once, in float64, draws the same tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3000, generator=generator)
    order = logits.argsort(descending=True)
    weights = np.exp((logits[order] - logits.max()).double().numpy() / 2)
    kept = len(weights)
    if "top_p" in filters:
        kept = int(np.searchsorted(np.cumsum(weights) / weights.sum(), filters["top_p"])) + 1
    if "min_p" in filters:
        kept = int((weights >= filters["min_p"]).sum())
    sums = np.cumsum(weights[:kept])
    numbers = uniform(np.array([(seed << 32) + 1 for seed in range(300)], np.uint64))

    token_ids = draw_many(logits.tolist(), 300, temperature=2.0, **filters)

    expected = order.numpy()[np.searchsorted(sums, numbers.astype(np.float64) * sums[-1])]
    # float32 sums of 3,000 weights may put a number on the other side of a border: 1 in 1,000.
    assert (token_ids != expected).sum() <= 3


def test_best_sorted_keeps_the_lowest_ids_of_equal_values() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randint(0, 40, (20, 3000), generator=generator).float()

    for count in (1, 7, 300):
        values, ids = best_sorted(z, count)
        whole = [sorted(range(3000), key=lambda i: (-row[i], i))[:count] for row in z.tolist()]
        assert ids.tolist() == whole
        assert all(a >= b for row in values.tolist() for a, b in pairwise(row))


def test_all_rows_of_a_mixed_batch_get_their_own_filters() -> None:
    samplings = [
        RowSampling(1, temperature=0.0),
        RowSampling(1, top_k=2),
        RowSampling(1, top_p=0.6),
        RowSampling(1, min_p=0.3),
        RowSampling(1, temperature=2.0),
    ]
    seen = [Counter[int]() for _ in samplings]
    for seed in range(300):
        sampler = Sampler(
            [RowContext((0,), s, seed << 32) for s in samplings],
            Capture(),
            vocab_size=5,
            eos_token_ids=frozenset(),
            device=torch.device("cpu"),
        )
        output = sampler.draw(torch.tensor(FIVE).repeat(5, 1), np.arange(5))
        for counter, token_id in zip(seen, output.token_ids.tolist(), strict=True):
            counter[token_id] += 1

    assert [set(counter) for counter in seen] == [{0}, {0, 1}, {0}, {0, 1}, {0, 1, 2, 3, 4}]


def test_logprobs_are_within_5e_6_of_a_float64_log_softmax() -> None:
    """float32 log_softmax over 49,152 words is off by 2e-5 a token on a CPU."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(16, 49_152, generator=generator) * 6
    sampler = Sampler(
        [RowContext((0,), RowSampling(1, temperature=0.0), 0)] * 16,
        Capture(logprobs=5),
        vocab_size=49_152,
        eos_token_ids=frozenset(),
        device=torch.device("cpu"),
    )

    output = sampler.draw(z, np.arange(16))

    exact = torch.log_softmax(z.double(), dim=1).numpy()
    rows = np.arange(16)
    np.testing.assert_allclose(output.logprobs, exact[rows, output.token_ids], atol=5e-6)
    np.testing.assert_allclose(output.top_logprobs, exact[rows[:, None], output.top_ids], atol=5e-6)


def test_a_word_without_weight_is_never_drawn() -> None:
    """The walk may use up less than the mass by a crumb: then the last possible word is taken."""
    width = 3000
    filters = Filters([RowSampling(1)] * 1, width)
    weights = np.zeros((1, width), np.float32)
    weights[0, :5] = [1, 0.5, 0.25, 0.125, 0.1]
    mass = np.array([weights.sum() * np.float32(1.001)], np.float32)

    choice, is_settled = filters.walk(weights, np.array([0]), mass, np.array([1], np.float32))

    assert choice.tolist() == [4]
    assert is_settled.tolist() == [True]


def test_large_logits_do_not_use_up_the_digits_of_logprobs() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(4, 1000, generator=generator) * 6 + 1000
    rows = [RowContext((0,), RowSampling(1, temperature=0.0), 0)] * 4
    sampler = Sampler(
        rows,
        Capture(logprobs=5),
        vocab_size=1000,
        eos_token_ids=frozenset(),
        device=torch.device("cpu"),
    )

    output = sampler.draw(z, np.arange(4))

    exact = torch.log_softmax(z.double(), dim=1).numpy()
    np.testing.assert_allclose(
        output.top_logprobs, exact[np.arange(4)[:, None], output.top_ids], atol=5e-6
    )
