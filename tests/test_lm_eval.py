"""lm-evaluation-harness on our engine: the numbers of its own HFLM, on the same rows."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from running import make_job, run_here
from transformers import AutoModelForCausalLM

from jobs.model import ModelRef
from jobs.scoring import Scoring
from workers.lm_eval import BatchwrightLM
from workers.model.folder import find_model
from workers.model.loading import load_tokenizer

pytestmark = pytest.mark.slow

DEMO = ModelRef("demo")
LENGTH = 64
PAIRS = {
    "plain": ("The capital of France is", " Paris"),
    "a space at the end of the context": ("The capital of France is ", "Paris"),
    "lines at the end of the context": ("Question: 2 + 2?\n\n", "Answer: 4"),
    "no context": ("", "Once upon a time"),
    "bytes of a character on both sides": ("Smile: ", "\U0001f642\U0001f642 yes"),
    "an accent that joins": ("cafe", "\u0301 au lait"),
    "one choice": ("Answer: A", " B"),
    "another choice": ("Answer: A", " C D"),
    "too long": ("one two three four five six seven eight nine ten " * 12, "eleven twelve"),
}


@pytest.fixture(scope="module")
def theirs() -> Iterator[HFLM]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    folder = find_model(DEMO)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    yield HFLM(
        pretrained=model, tokenizer=load_tokenizer(folder), device="cpu", batch_size=1,
        max_length=LENGTH,
    )  # fmt: skip
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def ours() -> BatchwrightLM:
    return BatchwrightLM("demo", max_length=LENGTH, max_batch_size=8)


def requests(kind: str, *arguments: tuple[object, ...]) -> list[Instance]:
    return [Instance(kind, {}, given, place) for place, given in enumerate(arguments)]


def test_continuations_have_the_numbers_of_the_harness(ours: BatchwrightLM, theirs: HFLM) -> None:
    """Cases G34 and G41: whatever stands at the boundary, and cut from the left."""
    asked = requests("loglikelihood", *PAIRS.values())

    found, expected = (lm.loglikelihood(asked, disable_tqdm=True) for lm in (ours, theirs))

    for name, (a, a_greedy), (b, b_greedy) in zip(PAIRS, found, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-3), name
        assert a_greedy == b_greedy, name


def test_a_context_of_spaces_is_none(ours: BatchwrightLM) -> None:
    """HFLM asserts that it has tokens, and ends the evaluation."""
    asked = requests("loglikelihood", ("   ", "Once upon a time"), ("", "   Once upon a time"))

    spaces, none = ours.loglikelihood(asked, disable_tqdm=True)

    assert spaces == none


def test_the_command_has_them_too(theirs: HFLM, tmp_path: Path) -> None:
    """From table to table. What lm-eval would cut is not asked."""
    pairs = [pair for name, pair in PAIRS.items() if name != "too long"]
    contexts, continuations = map(list, zip(*pairs, strict=True))
    source = tmp_path / "pairs.parquet"
    pq.write_table(pa.table({"context": contexts, "continuation": continuations}), source)

    rows, _ = run_here(make_job(source, tmp_path / "out", DEMO, scoring=Scoring()))
    expected = theirs.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)

    np.testing.assert_allclose(
        rows["loglikelihood"].to_numpy(), [value for value, _ in expected], rtol=1e-3, atol=1e-3
    )
    assert rows["is_greedy"].to_pylist() == [is_greedy for _, is_greedy in expected]


@pytest.mark.parametrize("words", [1, 40, 200])
def test_long_texts_are_rolled_alike(ours: BatchwrightLM, theirs: HFLM, words: int) -> None:
    """Case G42: of 200 words there are several windows."""
    text = " ".join(f"word{i % 7} and" for i in range(words))
    asked = requests("loglikelihood_rolling", (text,))

    [a], [b] = (lm.loglikelihood_rolling(asked, disable_tqdm=True) for lm in (ours, theirs))

    assert a == pytest.approx(b, rel=1e-3)


def test_a_text_in_windows_is_the_commands_too(theirs: HFLM, tmp_path: Path) -> None:
    texts = [" ".join(f"word{i % 7} and" for i in range(n)) for n in (1, 40, 200)]
    source = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"text": texts}), source)
    job = make_job(source, tmp_path / "out", DEMO, scoring=Scoring(), max_model_len=LENGTH)

    rows, _ = run_here(job)
    asked = requests("loglikelihood_rolling", *((text,) for text in texts))

    expected = theirs.loglikelihood_rolling(asked, disable_tqdm=True)
    np.testing.assert_allclose(rows["loglikelihood"].to_numpy(), expected, rtol=1e-3)


def test_answers_end_with_the_same_strings(ours: BatchwrightLM, theirs: HFLM) -> None:
    settings = {"until": ["\n\n", "Question"], "max_gen_toks": 24}
    texts = ["Question: What is 2 + 2?\nAnswer:", "Once upon a time", "def add(a, b):\n"]
    asked = requests("generate_until", *((text, dict(settings)) for text in texts))

    found, expected = (lm.generate_until(asked, disable_tqdm=True) for lm in (ours, theirs))

    assert found == expected
    assert not any(stop in text for text in found for stop in settings["until"])


def test_a_setting_that_means_nothing_here_is_refused(ours: BatchwrightLM) -> None:
    asked = requests("generate_until", ("a", {"until": ["b"], "num_beams": 4, "max_gen_toks": 8}))

    with pytest.raises(ValueError, match="num_beams have no meaning here"):
        ours.generate_until(asked, disable_tqdm=True)


def test_a_task_runs_to_its_figures(tmp_path: Path) -> None:
    """A task of files of our own, found by its name as any other."""
    lines = [
        {"question": f"The capital of {country} is", "choices": [" Paris", " Rome"], "label": label}
        for label, country in enumerate(["France", "Italy"])
    ]
    data = tmp_path / "capitals.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    task = {
        "task": "capitals", "dataset_path": "json", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")},
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}",
        "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip

    said = simple_evaluate(
        model="batchwright", model_args="model=demo,max_length=128", tasks=[task],
        bootstrap_iters=0,
    )  # fmt: skip

    assert said is not None
    assert said["results"]["capitals"]["acc,none"] == 1.0
