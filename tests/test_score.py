"""score(): tokens that are given, against the model's own forward pass of each row alone."""

import random

import numpy as np
import numpy.typing as npt
import pytest
import torch
from test_ragged import RUN, alone, make_config
from tiny_models import constant_model, random_model
from transformers import PreTrainedModel

from jobs.model import ModelFacts
from jobs.sampling import SamplingDefaults
from jobs.scoring import ScoreRequest
from workers.generate import generate, open_pipeline
from workers.model import scoring
from workers.model.kernels import Kernels, load_kernels
from workers.model.kv_cache import PAGE, Pages
from workers.model.opening import open_ragged
from workers.model.prefixes import is_alone, plan_nodes
from workers.model.shape import LayerShape
from workers.pipeline import PipelineLimits, ScoringPipeline, TokenScores
from workers.score import score

VOCAB = 64


def open_tiny(model: PreTrainedModel, kernels: Kernels | None = None) -> ScoringPipeline:
    vocab_size = model.config.get_text_config().vocab_size
    facts = ModelFacts(
        architecture="tiny", vocab_size=vocab_size, max_length=128, eos_token_ids=(),
        defaults=SamplingDefaults(), has_tokenizer=False, dtype="float32",
    )  # fmt: skip
    return open_ragged(model, facts, PipelineLimits(8, 100, 1000), kernels)


def random_ids(generator: random.Random, length: int) -> list[int]:
    return [generator.randrange(2, VOCAB - 1) for _ in range(length)]


def family(seed: int) -> tuple[list[list[int]], list[int]]:
    """Rows that begin alike, rows that are beginnings of others, twins, and strangers."""
    generator = random.Random(seed)
    header, question = random_ids(generator, 35), random_ids(generator, 20)
    rows = [
        random_ids(generator, 50),
        header + random_ids(generator, 30),
        header + question + [7],
        header + question + [9],
        header + question + [9, 11, 12],
        random_ids(generator, 2),
        header[:18],
        header + random_ids(generator, 8),
        header + question + [9],
        random_ids(generator, 64),
    ]
    contexts = [1, 40, 55, 55, 55, 1, 1, 36, 3, 60]
    return rows, contexts


def expected(
    logits: list[torch.Tensor], rows: list[list[int]], contexts: list[int]
) -> list[npt.NDArray[np.float64]]:
    whole = [torch.log_softmax(row_logits.double(), dim=1) for row_logits in logits]
    return [
        whole[row][range(first - 1, len(ids) - 1), ids[first:]].numpy()
        for row, (ids, first) in enumerate(zip(rows, contexts, strict=True))
    ]


@pytest.mark.parametrize("tokens_per_pass", [10, 1000])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", RUN)
def test_scores_are_those_of_each_row_alone(
    name: str, is_compiled: bool, tokens_per_pass: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every architecture, in passes that cut rows and families, a few logits at a time."""
    monkeypatch.setattr(scoring, "_TOKENS_PER_PASS", tokens_per_pass)
    monkeypatch.setattr(scoring, "_LOGITS_BYTES", 4 * VOCAB * 7)
    model = random_model(make_config(name, RUN[name]))
    rows, contexts = family(1)
    theirs = alone(model, rows)

    ours = score(
        open_tiny(model, load_kernels() if is_compiled else None),
        rows, num_context=contexts, output_logprobs=3,
    )  # fmt: skip

    for row, logprobs in enumerate(expected(theirs, rows, contexts)):
        scores, first = ours[row], contexts[row]
        np.testing.assert_allclose(scores.logprobs, logprobs, atol=2e-4, rtol=0)
        seen = theirs[row][first - 1 : -1]
        top = torch.log_softmax(seen.double(), dim=1).topk(3, dim=1)
        np.testing.assert_allclose(scores.top_logprobs, top.values, atol=2e-4, rtol=0)
        is_clear = (seen.topk(2, dim=1).values.diff(dim=1).abs() > 1e-3)[:, 0].numpy()
        is_best = seen.argmax(dim=1).numpy() == rows[row][first:]
        assert (scores.is_best == is_best)[is_clear].all()


def test_what_rows_share_is_run_once() -> None:
    rows, contexts = family(2)
    requests = [ScoreRequest(tuple(r), c) for r, c in zip(rows, contexts, strict=True)]

    nodes, wants = plan_nodes(requests)

    run = sum(len(node.token_ids) - node.num_shared for node in nodes)
    trie = {tuple(row[:n]) for row in rows for n in range(1, len(row))}
    assert len(trie) <= run <= len(trie) + (PAGE - 1) * len(nodes)
    asked = sorted((want.request, p) for w in wants for want in w
                   for p in range(want.start, want.stop))  # fmt: skip
    assert asked == [(i, p) for i, (row, first) in enumerate(zip(rows, contexts, strict=True))
                     for p in range(first - 1, len(row) - 1)]  # fmt: skip


def test_choices_of_one_token_cost_one_pass_over_their_context() -> None:
    question = tuple(random_ids(random.Random(0), 40))

    nodes, wants = plan_nodes([ScoreRequest((*question, choice), 40) for choice in (5, 6, 7, 8)])

    assert [node.token_ids for node in nodes] == [question]
    assert len(wants[0]) == 4


@pytest.mark.parametrize("seed", range(20))
def test_families_at_random_are_scored_as_their_rows_alone(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows grown from each other at random, and a pass that ends anywhere."""
    generator = random.Random(seed)
    monkeypatch.setattr(scoring, "_TOKENS_PER_PASS", generator.choice([1, 7, 16, 40, 500]))
    rows = [random_ids(generator, 40)]
    while len(rows) < 12:
        stem = generator.choice(rows)
        stem = stem[: generator.randrange(len(stem) + 1)]
        rows.append((stem + random_ids(generator, generator.randrange(2, 30)))[:100])
    contexts = [generator.randrange(1, len(row)) for row in rows]
    model = random_model(make_config("Llama", RUN["Llama"]))
    theirs = expected(alone(model, rows), rows, contexts)
    pipeline = open_tiny(model, load_kernels())

    first, again = (score(pipeline, rows, num_context=contexts) for _ in range(2))

    for row, logprobs in enumerate(theirs):
        np.testing.assert_allclose(first[row].logprobs, logprobs, atol=2e-4, rtol=0)
        assert first[row].logprobs.tobytes() == again[row].logprobs.tobytes()


def test_a_table_of_logits_scores_as_its_softmax() -> None:
    table = [17.03, 17.05, 3.0]

    [scores] = score(open_tiny(constant_model(table)), [[2, 0, 1, 2]])

    np.testing.assert_allclose(scores.logprobs, [-0.7032, -0.6832, -14.7332], atol=5e-5)
    assert scores.is_best.tolist() == [False, True, False]
    assert scores.loglikelihood == pytest.approx(-16.1196, abs=1e-4)
    assert not scores.is_greedy


def test_of_equal_logits_the_lowest_id_is_the_greedy_one() -> None:
    [scores] = score(open_tiny(constant_model([1.0, 1.0, 0.0])), [[2, 0, 1]])

    assert scores.is_best.tolist() == [True, False]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_logits_that_are_no_numbers_give_no_number(is_compiled: bool) -> None:
    model = constant_model([1.0, 1.0, 0.0])
    pipeline = open_tiny(model, load_kernels() if is_compiled else None)
    with torch.no_grad():
        model.get_input_embeddings().weight[2] = float("nan")

    [scores] = score(pipeline, [[2, 0, 1]])

    assert np.isnan(scores.logprobs).all()
    assert not scores.is_best.any()


def test_the_echo_engine_scores_what_it_would_generate() -> None:
    pipeline = open_pipeline("echo", engine="echo")
    prompts = [[1, 2, 3], [9]]
    answers = generate(pipeline, prompts, max_new_tokens=8, temperature=0, output_logprobs=2)
    assert answers.log_probs is not None

    scores: list[TokenScores] = score(
        pipeline, answers.sequences, num_context=[3, 1], output_logprobs=2
    )

    for row, said in zip(scores, answers.log_probs, strict=True):
        assert row.is_greedy
        np.testing.assert_array_equal(row.logprobs, np.float32(said.token_log_probabilities))
        assert [list(d) for d in said.top_log_probabilities] == row.top_ids.tolist()


@pytest.mark.parametrize(
    ("match", "rows", "settings"),
    [
        ("row 1 has 2 tokens, of which 2 are context", [[1, 2, 3], [1, 2]], {"num_context": 2}),
        ("row 0 has a context of 0 tokens", [[1, 2]], {"num_context": 0}),
        ("row 0 has 0 tokens", [[]], {}),
        ("row 0 holds the token id 300; the model knows 0 to 256", [[1, 300]], {}),
        ("row 0 has 8194 tokens", [[1] * 8194], {}),
        ("num_context has 1 entries for 2 rows", [[1, 2], [1, 2]], {"num_context": [1]}),
        ("between 0 and 257, got 258", [[1, 2]], {"output_logprobs": 258}),
        ("row 0 is the number 1", [1, 2], {}),
    ],
)
def test_what_cannot_be_scored_is_refused(
    match: str, rows: list[list[int]], settings: dict[str, int]
) -> None:
    pipeline = open_pipeline("echo", engine="echo")

    with pytest.raises((TypeError, ValueError), match=f"score: .*{match}"):
        score(pipeline, rows, **settings)


def test_no_rows_have_no_scores() -> None:
    assert score(open_tiny(constant_model([1.0, 2.0])), []) == []
    assert score(open_pipeline("echo", engine="echo"), []) == []


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", RUN)
def test_a_long_row_alone_is_scored_in_one_pass_with_one_layers_keys(
    name: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside families, one of which is as long, and whose keys must stay."""
    monkeypatch.setattr(scoring, "_TOKENS_PER_PASS", 30)
    model = random_model(make_config(name, RUN[name]))
    rows, contexts = family(3)
    pipeline = open_tiny(model, load_kernels() if is_compiled else None)
    theirs = expected(alone(model, rows), rows, contexts)
    nodes, _ = plan_nodes([ScoreRequest(tuple(r), c) for r, c in zip(rows, contexts, strict=True)])
    lonely = [row for row in range(len(nodes)) if is_alone(nodes, row, 30)]
    assert len(lonely) == 2
    assert max(len(node.token_ids) for node in nodes if node.sharer is not None) > 30

    for _ in range(2):  # The second time in pages that were used before.
        ours = score(pipeline, rows, num_context=contexts)
        for found, logprobs in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(found.logprobs, logprobs, atol=2e-4, rtol=0)


@pytest.mark.parametrize("tokens_per_pass", [30, 1000])
def test_logits_that_are_kept_are_those_of_each_row_alone(
    tokens_per_pass: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_TOKENS_PER_PASS", tokens_per_pass)
    monkeypatch.setattr(scoring, "_LOGITS_BYTES", 4 * VOCAB * 7)
    model = random_model(make_config("Llama", RUN["Llama"]))
    rows, contexts = family(4)
    requests = [ScoreRequest(tuple(r), c) for r, c in zip(rows, contexts, strict=True)]

    found = open_tiny(model, load_kernels()).score(requests, 2, keeps_logits=True)

    for row, theirs in enumerate(alone(model, rows)):
        expected_logits = theirs[contexts[row] - 1 : -1].numpy()
        np.testing.assert_allclose(found[row].logits, expected_logits, atol=2e-4)
        np.testing.assert_allclose(
            found[row].logprobs, expected([theirs], [rows[row]], [contexts[row]])[0], atol=2e-4
        )


def test_pages_that_pass_are_one_place_for_all_layers_alike() -> None:
    shape, wide = LayerShape(2, 8, 8, torch.float32, None), LayerShape(4, 8, 8, torch.float32, None)
    pages = Pages(3, torch.device("cpu"), are_passing=True)

    for layer, its_shape in enumerate((shape, wide, shape, wide)):
        pages.allocate(layer, its_shape)

    assert pages.layers[0] is pages.layers[2]
    assert pages.layers[1] is pages.layers[3]
    assert pages.layers[0].shape != pages.layers[1].shape
