"""Every engine of the table keeps the same promises.

A new engine is one line in MODELS here, and whatever it cannot do is in its capabilities.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_models import byte_tokenizer, random_model, save
from transformers import LlamaConfig

from jobs.completion import Capture, Completion
from jobs.errors import ModelError, SettingError
from jobs.model import ModelRef
from jobs.prompt import Prompt
from jobs.sampling import RowSampling
from workers.engine import ENGINES, Engine, load_engine
from workers.pipeline import PipelineLimits

GREEDY = RowSampling(max_new_tokens=6, temperature=0.0)
SAMPLED = RowSampling(max_new_tokens=6, temperature=1.0)
PROMPTS = [[5, 9, 11], [7, 3, 22, 41, 8, 30, 12, 19], [60], [5, 9, 11]]


def make_torch_model(folder: Path) -> str:
    """A random Llama over bytes, with logits far enough apart to be told."""
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, eos_token_id=256,
    )  # fmt: skip
    return save(random_model(config), folder, tokenizer=byte_tokenizer())


MODELS: dict[str, Callable[[Path], str]] = {
    "torch": make_torch_model,
    "echo": lambda folder: "echo",
}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    name = request.param
    model = ModelRef(MODELS[name](tmp_path_factory.mktemp(name)), engine=name)
    engine_class = load_engine(name)
    facts = engine_class.read_facts(model)
    engine = engine_class(
        model, facts, PipelineLimits(8, 128, 1024), device="cpu", dtype="float32", kernels="torch"
    )
    engine.open()
    return engine


def answer(
    engine: Engine,
    prompts: list[list[int]],
    sampling: RowSampling,
    *,
    capture: Capture | None = None,
    seeds: list[int] | None = None,
) -> list[Completion]:
    rows = [
        Prompt(10 + i, seed, token_ids=tuple(ids))
        for i, (ids, seed) in enumerate(
            zip(prompts, seeds or [i << 32 for i in range(len(prompts))], strict=True)
        )
    ]
    completions, _ = engine.generate(rows, sampling, capture or Capture())
    return completions


def ids(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def test_every_engine_is_tested_here() -> None:
    assert set(MODELS) == set(ENGINES)


def test_one_completion_for_each_prompt_in_order(engine: Engine) -> None:
    completions = answer(engine, PROMPTS, GREEDY)

    assert [completion.row_id for completion in completions] == [10, 11, 12, 13]
    assert [completion.num_prompt_tokens for completion in completions] == [3, 8, 1, 3]
    assert all(1 <= len(tokens) <= 6 for tokens in ids(completions))


def test_greedy_rows_are_the_same_alone_together_and_reversed(engine: Engine) -> None:
    together = ids(answer(engine, PROMPTS, GREEDY))

    assert ids(answer(engine, PROMPTS[::-1], GREEDY))[::-1] == together
    assert [ids(answer(engine, [p], GREEDY))[0] for p in PROMPTS] == together
    assert together[0] == together[3]


def test_draws_follow_from_the_rows_seed_alone(engine: Engine) -> None:
    seeds = [1, 2, 3, 4]
    together = ids(answer(engine, PROMPTS, SAMPLED, seeds=seeds))

    assert ids(answer(engine, PROMPTS[::-1], SAMPLED, seeds=seeds[::-1]))[::-1] == together
    assert ids(answer(engine, [PROMPTS[2]], SAMPLED, seeds=[3])) == [together[2]]
    assert together[0] != together[3]


def test_logits_are_raw_float32_and_logprobs_follow_from_them(engine: Engine) -> None:
    if not engine.capabilities.logits:
        pytest.fail("state in the table of docs/engines.md that this engine has no logits")
    completions = answer(engine, PROMPTS, SAMPLED, capture=Capture(logprobs=3, logits=True))

    for completion in completions:
        logits, tokens = completion.logits, completion.token_ids
        assert logits.dtype == np.float32
        assert len(logits) == len(tokens) == len(completion.logprobs)
        assert completion.top_ids.shape == completion.top_logprobs.shape == (len(tokens), 3)
        exact = logits.astype(np.float64)
        exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
        steps = np.arange(len(tokens))
        # 5e-6: logit minus logsumexp, both float32.
        np.testing.assert_allclose(completion.logprobs, exact[steps, tokens], atol=5e-6)
        best = np.argsort(-exact, axis=1, kind="stable")[:, :3]
        assert completion.top_ids.tolist() == best.tolist()


def test_capturing_changes_no_token(engine: Engine) -> None:
    plain = answer(engine, PROMPTS, SAMPLED)
    captured = answer(engine, PROMPTS, SAMPLED, capture=Capture(logprobs=2, logits=True))

    assert ids(plain) == ids(captured)
    assert plain[0].logits is None
    assert plain[0].logprobs is None


def test_a_stop_id_is_the_rows_last_token_and_its_reason(engine: Engine) -> None:
    whole = ids(answer(engine, PROMPTS, GREEDY))
    stop = whole[1][2]
    stopping = RowSampling(6, temperature=0.0, stop_token_ids=frozenset([stop]))

    stopped = answer(engine, PROMPTS, stopping)

    assert ids(stopped)[1] == whole[1][: whole[1].index(stop) + 1]
    assert stopped[1].finish_reason == "stop"
    assert stopped[1].stop_reason == str(stop)


def test_rows_run_on_where_their_end_is_ignored(engine: Engine) -> None:
    whole = ids(answer(engine, PROMPTS, GREEDY))
    ignoring = RowSampling(
        6, temperature=0.0, stop_token_ids=frozenset(whole[1][:1]), ignore_eos=True
    )

    assert [len(tokens) for tokens in ids(answer(engine, PROMPTS, ignoring))] == [6] * 4


def test_min_new_tokens_is_kept(engine: Engine) -> None:
    whole = ids(answer(engine, PROMPTS, GREEDY))
    stops = frozenset(token for tokens in whole for token in tokens)
    sampling = RowSampling(6, min_new_tokens=4, temperature=0.0, stop_token_ids=stops)

    for tokens in ids(answer(engine, PROMPTS, sampling)):
        assert len(tokens) >= 4
        assert not stops & set(tokens[:4])


def test_a_batch_of_one_row_and_a_full_batch_both_run(engine: Engine) -> None:
    assert len(answer(engine, [[5]], GREEDY)) == 1
    assert len(answer(engine, [[5]] * 8, GREEDY)) == 8


def test_text_is_the_tokens_decoded_together(engine: Engine) -> None:
    texts = ["ab", "größe"]
    encoded = engine.encode(texts, add_special_tokens=False)

    assert engine.decode(encoded) == texts
    completions = answer(engine, [[104, 105]], GREEDY)
    assert completions[0].text == engine.decode(ids(completions))[0]


def test_tokens_can_be_spelled_without_opening_the_model(engine: Engine) -> None:
    name = next(n for n, target in ENGINES.items() if target.endswith(type(engine).__name__))
    model = engine._model if hasattr(engine, "_model") else ModelRef("echo", engine=name)

    assert type(engine).spell(model, [97, 32]) == ["a", " "]


def test_a_device_that_an_engine_does_not_have_is_refused(engine: Engine) -> None:
    assert type(engine).find_device("cpu") == "cpu"
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(ModelError):
            type(engine).find_device("cuda")


def test_an_engine_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(SettingError) as caught:
        load_engine("tensor")

    assert str(caught.value) == "there is no engine 'tensor'. There are: torch, echo."
