"""The demo model against Modular MAX's own numbers, and against transformers' own generate().

tests/data/max_golden.json holds what MAX 26.7.0 returned on a CPU in float32 for these weights.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from workers.generate import GenerateIterator, generate
from workers.pipeline import BatchPipeline

pytestmark = pytest.mark.slow

LOGITS = 2e-4
"Two implementations in float32; measured 1.1e-4 at most against transformers."
LOGPROBS = 1e-3
"MAX's log-probabilities are off by up to 3.1e-4 from a float64 log-softmax of its own logits."

GOLDEN = json.loads((Path(__file__).parent / "data" / "max_golden.json").read_text())
CASES = [(part, name) for part in ("penalties", "min_new_and_stop") for name in GOLDEN[part]]


@pytest.mark.parametrize("name", GOLDEN["greedy"])
def test_greedy_tokens_logprobs_and_logits(demo: BatchPipeline, name: str) -> None:
    golden = GOLDEN["greedy"][name]

    result = generate(
        demo, [golden["prompt"]], max_new_tokens=24, temperature=0,
        output_logits=True, output_logprobs=5,
    )  # fmt: skip

    assert result.sequences == [golden["prompt"] + golden["new_tokens"]]
    [log_probs], [logits] = result.log_probs, result.logits
    np.testing.assert_allclose(
        log_probs.token_log_probabilities, golden["token_log_probabilities"], atol=LOGPROBS
    )
    for step, (ids, values) in enumerate(golden["top5"]):
        ours = [log_probs.top_log_probabilities[step].get(token_id) for token_id in ids]
        if None not in ours:  # Two ids of nearly equal logits may trade the fifth place.
            np.testing.assert_allclose(ours, values, atol=LOGPROBS)
    np.testing.assert_allclose(
        logits[0, golden["first_step_ids"]], golden["first_step_logits"], atol=LOGITS
    )
    np.testing.assert_allclose(
        logits[-1, golden["last_step_ids"]], golden["last_step_logits"], atol=LOGITS
    )


@pytest.mark.parametrize(("part", "name"), CASES)
def test_penalties_minima_and_stops(demo: BatchPipeline, part: str, name: str) -> None:
    golden = GOLDEN[part][name]
    prompts = [row["prompt"] for row in golden["rows"]]

    result = generate(
        demo, prompts, max_new_tokens=golden["max_new_tokens"], output_logprobs="chosen",
        **golden["args"],
    )  # fmt: skip

    assert result.sequences == [row["prompt"] + row["new_tokens"] for row in golden["rows"]]
    for log_probs, row in zip(result.log_probs, golden["rows"], strict=True):
        np.testing.assert_allclose(
            log_probs.token_log_probabilities, row["token_log_probabilities"], atol=LOGPROBS
        )


@pytest.mark.parametrize("number", range(len(GOLDEN["sampling"])))
def test_the_same_seed_draws_the_same_tokens(demo: BatchPipeline, number: int) -> None:
    golden = dict(GOLDEN["sampling"][number])
    prompts, sequences = golden.pop("prompts"), golden.pop("sequences")
    golden["top_k"] = 255 if golden["top_k"] == -1 else golden["top_k"]  # MAX stops there.

    assert generate(demo, prompts, **golden).sequences == sequences


def test_the_same_seed_draws_the_same_tokens_under_penalties(demo: BatchPipeline) -> None:
    golden = GOLDEN["sampling_with_penalties"]

    assert generate(demo, golden["prompts"], **golden["args"]).sequences == golden["sequences"]


def test_a_removed_row_changes_no_other(demo: BatchPipeline) -> None:
    prompts = [GOLDEN["greedy"][name]["prompt"] for name in ("capital", "arith", "list")]
    whole = generate(demo, prompts, max_new_tokens=8, seed=3).sequences
    with GenerateIterator(demo, prompts, max_new_tokens=8, seed=3) as batch:
        batch.step()
        batch.remove(0)
        for _ in batch:
            pass

    assert batch.sequences == [whole[0][:6], whole[1], whole[2]]


def test_rows_alone_and_in_any_batch_agree(demo: BatchPipeline) -> None:
    """Cases G01, G16, G34: batching must not change tokens."""
    prompts = [golden["prompt"] for golden in GOLDEN["greedy"].values()]

    together = generate(demo, prompts, max_new_tokens=8, temperature=0, output_logits=True)
    reverse = generate(demo, prompts[::-1], max_new_tokens=8, temperature=0)

    assert reverse.sequences[::-1] == together.sequences
    for row, prompt in enumerate(prompts):
        alone = generate(demo, [prompt], max_new_tokens=8, temperature=0, output_logits=True)
        assert alone.sequences[0] == together.sequences[row]
        # 1e-3: sums over 576 channels and 30 layers, grouped differently by the number of rows.
        np.testing.assert_allclose(alone.logits[0], together.logits[row], atol=1e-3)


def test_the_pad_token_in_a_prompt_is_a_token_like_any_other(demo: BatchPipeline) -> None:
    """Cases G01, G03, G47: pad is EOS here, and the chat template puts it inside every prompt.

    A mask made of ids instead of lengths answers "The only colour that exists is the colour".
    """
    system = GOLDEN["greedy"]["chat"]["prompt"][:21]
    assert system.count(2) == 1
    short = [*system, 1, 4093, 198, 5820, 582, 7302, 30, 2, 198, 1, 520, 9531, 198]
    fruits = [
        19161,
        253,
        1890,
        1398,
        282,
        2531,
        5574,
        338,
        359,
        2382,
        28,
        5361,
        28,
        284,
        3878,
        1745,
    ]
    long = [*system, 1, 4093, 198, *fruits, 30, 2, 198, 1, 520, 9531, 198]

    alone = generate(demo, [short], max_new_tokens=8, temperature=0)
    batch = generate(demo, [short, long], max_new_tokens=8, temperature=0)

    answer = [2705, 7302, 314, 441, 1636, 30, 2]  # "One colour is not possible." and EOS.
    assert alone.sequences[0] == short + answer
    assert batch.sequences[0] == short + answer
    assert batch.finish_reasons[0] == "stop"


@pytest.mark.parametrize(
    ("prompt", "tokens", "total", "first"),
    [
        ([504, 3575, 282, 4649, 314], [7042, 30, 198, 198, 504, 2988, 314, 42], -8.4861, -0.2581),
        ([6403, 1980, 253, 655], [28, 260, 2240, 282, 23324, 27108, 436, 253], -10.6774, -0.0755),
        ([34, 1232, 216, 34, 446], [216, 35, 1232, 216, 34, 446, 216, 37], -4.4461, -0.1470),
    ],
    ids=["france", "upon-a-time", "sum"],
)
def test_the_sum_of_logprobs_is_the_likelihood_of_the_answer(
    demo: BatchPipeline, prompt: list[int], tokens: list[int], total: float, first: float
) -> None:
    """Case G40."""
    result = generate(demo, [prompt], max_new_tokens=8, temperature=0, output_logprobs="chosen")

    logprobs = result.log_probs[0].token_log_probabilities
    assert result.sequences == [prompt + tokens]
    assert sum(logprobs) == pytest.approx(total, abs=2e-3)
    assert logprobs[0] == pytest.approx(first, abs=2e-3)
    assert sum(logprobs) == pytest.approx(_likelihood(demo, prompt, tokens), abs=1e-3)


def _likelihood(demo: BatchPipeline, prompt: list[int], tokens: list[int]) -> float:
    """The same sum from one forward pass over prompt and answer, in float64."""
    from transformers import AutoModelForCausalLM

    from jobs.model import ModelRef
    from workers.model.folder import find_model

    model = AutoModelForCausalLM.from_pretrained(find_model(ModelRef("demo"))).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0].double()
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=1)
    return float(logprobs[torch.arange(len(tokens)), tokens].sum())
