"""What the tokens of prompts score, beside their answers."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import echo_job, make_job, prepared, read_rows, run_here, run_plan, write_prompts
from tiny_models import save, successor_model

from cluster.placement import Placement
from jobs.errors import SettingError
from jobs.model import ModelRef
from runner.plan import make_plan
from runner.run import run_job
from runner.verify import verify_output
from workers.generate import open_pipeline
from workers.score import score


def test_each_token_but_the_first_is_scored_as_score_does(tmp_path: Path) -> None:
    prompts = ["hello", "a", None, "xyz"]
    source = write_prompts(tmp_path / "in.parquet", prompts)
    job = echo_job(source, tmp_path / "out", prompt_logprobs=2, logprobs=1)

    rows, _ = run_here(job)
    plain, _ = run_here(echo_job(source, tmp_path / "plain", logprobs=1))

    pipeline = open_pipeline("echo", engine="echo")
    [hello, xyz] = score(pipeline, [list(b"hello"), list(b"xyz")], output_logprobs=2)
    assert rows["prompt_token_ids"].to_pylist() == [list(b"hello"), [97], None, list(b"xyz")]
    logprobs = rows["prompt_logprobs"].to_pylist()
    assert logprobs == [[None, *hello.logprobs], [None], None, [None, *xyz.logprobs]]
    ids, values = rows["prompt_top_ids"].to_pylist(), rows["prompt_top_logprobs"].to_pylist()
    assert ids == [[None, *hello.top_ids.tolist()], [None], None, [None, *xyz.top_ids.tolist()]]
    assert values[0][1:] == hello.top_logprobs.tolist()
    assert values[1:3] == [[None], None]
    assert rows["token_ids"].equals(plain["token_ids"])
    assert rows["logprobs"].equals(plain["logprobs"])


def test_verify_answers_them_again(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["hello", "a", None, "xyz"])
    job = echo_job(source, tmp_path / "out", prompt_logprobs=2)
    run_here(job)
    for _ in run_job(job, Placement(), start="resume"):
        pass

    verdict = verify_output(job.output, 4)

    assert verdict.problems == []
    assert verdict.rows_repeated == verdict.rows_same == 4


def test_verify_finds_lists_that_are_not_the_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["hello"])
    run_here(echo_job(source, tmp_path / "out", prompt_logprobs=0))
    from jobs import checks

    read = checks.read_pieces

    def spoiled(path: str):  # type: ignore[no-untyped-def]
        for table in read(path):
            name = "prompt_logprobs"
            array = pa.array([[-1.0, -2.0]], table.schema.field(name).type)
            place = table.column_names.index(name)
            yield table.set_column(place, table.schema.field(name), array)

    monkeypatch.setattr(checks, "read_pieces", spoiled)

    problems = verify_output(str(tmp_path / "out"), 0).problems
    assert any("prompt_logprobs has 2 entries for 5 tokens" in problem for problem in problems)


def test_without_alternatives_there_are_no_columns_of_them(tmp_path: Path) -> None:
    model = save(successor_model(12), tmp_path / "model")
    ids = pa.array([[3, 4, 5]], pa.list_(pa.int32()))
    pq.write_table(pa.table({"ids": ids}), tmp_path / "in.parquet")
    job = make_job(
        tmp_path / "in.parquet", tmp_path / "out", ModelRef(model), prompt_logprobs=0,
        token_ids_column="ids", max_new_tokens=2,
    )  # fmt: skip

    rows, _ = run_here(job)

    assert "prompt_top_ids" not in rows.column_names
    [logprobs] = rows["prompt_logprobs"].to_pylist()
    assert logprobs[0] is None
    np.testing.assert_allclose(logprobs[1:], [0, 0], atol=1e-5)
    assert rows["token_ids"].to_pylist() == [[6, 7]]


def test_too_many_alternatives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="prompt_logprobs must be between 0 and 64, got 65"):
        echo_job(tmp_path / "in", tmp_path / "out", prompt_logprobs=65)


def test_more_alternatives_than_words_are_refused(tmp_path: Path, models: dict[str, str]) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a"], ids=pa.array([[1, 2]]))
    job = make_job(
        source, tmp_path / "out", ModelRef(models["const5"]), prompt_logprobs=6,
        token_ids_column="ids",
    )  # fmt: skip

    with pytest.raises(SettingError, match="prompt_logprobs must be between 0 and 5"):
        make_plan(job)


def test_shards_of_long_lists_are_small(tmp_path: Path) -> None:
    """All prompts of a shard are held at once."""
    source = write_prompts(tmp_path / "in.parquet", ["a"] * 2000)
    sizes = [
        make_plan(echo_job(source, tmp_path / "out", prompt_logprobs=n)).rows_per_shard
        for n in (0, 1)
    ]

    assert sizes == [32, 4]


def test_an_empty_input_has_the_columns(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", [])
    plan = prepared(echo_job(source, tmp_path / "out", prompt_logprobs=3))

    run_plan(plan)

    rows = read_rows(plan.job.output)
    assert rows.schema.field("prompt_top_ids").type.value_type.list_size == 3
