"""Whole runs on a Ray of their own: what is written, what is printed, and the exit code."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow.dataset as ds
import pytest
from running import (
    BATCHWRIGHT,
    batchwright,
    echo_job,
    read_rows,
    run_here,
    worker_pids,
    write_prompts,
)
from tiny_models import byte_tokenizer, random_model, save
from transformers import BertConfig

ECHO = ("--model", "echo", "--engine", "echo", "--max-new-tokens", 4, "--temperature", 0)


def test_a_run_from_end_to_end(tmp_path: Path) -> None:
    """Cases I01, J16, J21, O17: one row for every row, the truth in the exit code, quiet logs."""
    prompts = [None if i == 3 else f"row {i}" for i in range(10)]
    write_prompts(tmp_path / "in.parquet", prompts)

    result = batchwright(
        "run", "in.parquet", "out", *ECHO, "--logprobs", 2, "--output-logits",
        "--rows-per-shard", 4, "--num-workers", 1, "--json",
        cwd=tmp_path, env={"RAY_ADDRESS": "http://127.0.0.1:1"},
    )  # fmt: skip

    assert result.returncode == 3, result.stderr
    summary = json.loads(result.stdout)
    assert (summary["rows"], summary["failed_rows"]) == (10, 1)
    assert summary["failed"] == {"null_prompt": 1}
    assert list(summary["stages"]) == ["imports", "plan", "ray", "model", "rows", "close"]
    assert sum(list(summary["stages"].values())[2:]) == pytest.approx(summary["seconds"])
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert manifest["stages"] == summary["stages"]
    assert "\r" not in result.stderr
    assert "\x1b" not in result.stderr
    lines = result.stderr.splitlines()
    assert lines[:3] == [
        "A row ends with token 256.",
        "The tokenizer adds nothing to a text.",
        "10 rows, 3 shards, 1 worker on this machine",
    ]
    assert sorted(line.split(":")[0].split(" ")[1] for line in lines[3:6]) == ["0", "1", "2"]
    assert lines[6] == "10 rows: 9 answered, 1 error"
    assert lines[7] == "  null_prompt: 1"
    assert lines[-1] == "output in out"

    folder = tmp_path / "out"
    assert sorted(os.listdir(folder)) == [
        "_SUCCESS", "_job.json", "_manifest.json", "_plan.json", "_records",
        "part-00000.parquet", "part-00001.parquet", "part-00002.parquet",
    ]  # fmt: skip
    check_json_files(folder)
    check_readers(folder)


def check_json_files(folder: Path) -> None:
    job, plan, manifest = (
        json.loads((folder / f"_{name}.json").read_text()) for name in ("job", "plan", "manifest")
    )
    assert job["asked"]["sampling"]["top_k"] is None
    assert (job["identity"]["top_k"], job["sampling_origins"]["top_k"]) == (-1, "neutral")
    assert job["asked"]["model"]["threads"] == 1
    assert (plan["num_rows"], plan["shards"]) == (10, [[0, 4], [4, 8], [8, 10]])
    assert plan["files"][0]["num_rows"] == 10
    assert manifest["counts"]["rows"] == sum(part["num_rows"] for part in manifest["parts"]) == 10
    assert manifest["versions"]["ray"] != "not installed"
    assert manifest["placement"]["num_workers"] == 1
    assert manifest["notes"][0] == "A row ends with token 256."


def check_readers(folder: Path) -> None:
    """The same rows in pyarrow, pandas and DuckDB, markers passed over."""
    ours = read_rows(folder)
    assert ours["row_id"].to_pylist() == list(range(10))
    assert ds.dataset(folder).to_table().num_rows == 10
    frame = pd.read_parquet(folder)
    assert frame["id"].tolist() == list(range(10))
    assert [len(ids) for ids in frame["token_ids"].dropna()] == [4] * 9
    parts = f"read_parquet('{folder}/part-*.parquet')"
    assert duckdb.sql(f"select count(*) from {parts}").fetchall() == [(10,)]
    [(logits,)] = duckdb.sql(f"select logits from {parts} where row_id = 9").fetchall()
    assert logits == ours["logits"][9].as_py()


@pytest.mark.slow
def test_a_second_run_is_refused_and_overwriting_starts_afresh(tmp_path: Path) -> None:
    """An empty input is a success that says there was nothing to do: cases I06, O17."""
    write_prompts(tmp_path / "in.parquet", [])
    command = ("run", "in.parquet", "out", *ECHO)

    first = batchwright(*command, "--output-format", "arrow", cwd=tmp_path)
    again = batchwright(*command, cwd=tmp_path)
    afresh = batchwright(*command, "--overwrite", "-q", cwd=tmp_path)

    assert first.returncode == 0, first.stderr
    assert "nothing to do: there are no rows" in first.stderr
    assert again.returncode == 4
    assert "the folder is not empty" in again.stderr
    assert afresh.returncode == 0
    assert read_rows(tmp_path / "out").num_rows == 0
    assert [name for name in os.listdir(tmp_path / "out") if name.startswith("part")] == [
        "part-00000.parquet"
    ]


@pytest.mark.slow
def test_the_folder_one_stands_in_changes_nothing(tmp_path: Path) -> None:
    """Ray lets workers import from the driver's folder first, and ours have everyday names."""
    home = tmp_path / "home"
    for name in ("jobs", "workers"):
        (home / name).mkdir(parents=True)
        (home / name / "__init__.py").write_text("raise SystemExit('this must never run')")
    (home / "numpy.py").write_text("raise SystemExit('nor this')")
    write_prompts(home / "in.parquet", ["a", "b"])

    result = batchwright("run", "in.parquet", "out", *ECHO, "-q", cwd=home)

    assert result.returncode == 0, result.stderr
    assert read_rows(home / "out").num_rows == 2


@pytest.mark.slow
def test_an_old_output_is_kept_until_the_new_model_has_been_opened(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=257, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    bert = save(random_model(config), tmp_path / "bert", tokenizer=byte_tokenizer())
    source = write_prompts(tmp_path / "in.parquet", ["a"])
    run_here(echo_job(source, tmp_path / "out"))

    result = batchwright(
        "run", source, tmp_path / "out", "--model", bert, "--max-new-tokens", 2, "--overwrite"
    )

    assert result.returncode == 2
    assert "BertLMHeadModel cannot be run in ragged batches" in result.stderr
    assert read_rows(tmp_path / "out").num_rows == 1


@pytest.mark.slow
def test_a_lost_worker_leaves_no_draft_and_no_word_among_the_data(tmp_path: Path) -> None:
    write_prompts(tmp_path / "in.parquet", [f"{i}" for i in range(30)])
    command = [
        BATCHWRIGHT, "run", "in.parquet", "out", "--model", "echo", "--engine", "echo", "--json",
        "--max-new-tokens", "3000", "--ignore-eos", "--rows-per-shard", "10", "--num-workers", "1",
    ]  # fmt: skip
    driver = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "out" / "part-00000.parquet").exists():
        assert driver.poll() is None
        time.sleep(0.1)
    for pid in worker_pids(driver.pid):
        os.kill(pid, signal.SIGKILL)

    words, warnings = driver.communicate()

    assert driver.returncode == 0, warnings
    assert json.loads(words)["rows"] == 30
    assert "worker lost on shard 1: " in warnings
    assert not [name for name in os.listdir(tmp_path / "out") if name.startswith(".")]
