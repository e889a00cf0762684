"""Jobs that go on where they were broken off: nothing done twice, nothing mixed, nothing silent."""

import dataclasses
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chaos import hashes
from running import echo_job, read_rows, run_here, write_prompts

from cluster.placement import Placement
from jobs.errors import RefusedError, StoppedError, WorkerError
from jobs.folder import read_json
from jobs.job import Job
from jobs.model import ModelRef
from jobs.output import Start
from jobs.report import ShardReport
from jobs.sampling import Sampling
from jobs.stop import Stop
from jobs.tolerance import Tolerance
from runner.run import Finished, run_job
from runner.verify import verify_output

on_ray = pytest.mark.usefixtures("shared_ray")
ONE = Placement(num_workers=1)
SETTINGS = {"rows_per_shard": 10, "logprobs": 2, "temperature": 1.0, "seed": 5}


def source_of(folder: Path, num_rows: int = 60) -> Path:
    prompts = [None if i == 13 else f"{'x' * (i % 37)} {i}" for i in range(num_rows)]
    return write_prompts(folder / "in.parquet", prompts)


def finish(job: Job, start: Start = "new", **tolerance: object) -> tuple[list[int], Finished]:
    """Runs a job to its end. Returns the shards that were done, and what the run said last."""
    done = []
    for report in run_job(job, ONE, Tolerance(**tolerance), start=start):
        if isinstance(report, ShardReport):
            done.append(report.shard.index)
    assert isinstance(report, Finished)
    return done, report


def break_off(job: Job, num_shards: int, start: Start = "new") -> None:
    """Runs a job until some shards are finished, and gives it up."""
    run = run_job(job, ONE, start=start)
    left = num_shards
    for report in run:
        left -= isinstance(report, ShardReport)
        if not left:
            break
    run.close()


@on_ray
def test_a_job_goes_on_where_it_was_broken_off_and_ends_with_the_same_bytes(
    tmp_path: Path,
) -> None:
    """Case J01, three times over."""
    source = source_of(tmp_path)
    run_here(echo_job(source, tmp_path / "calm", **SETTINGS))
    job = echo_job(source, tmp_path / "out", **SETTINGS)
    break_off(job, 2)
    break_off(job, 1, "resume")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("part-*")}
    assert 3 <= len(before) < 6

    done, finished = finish(job, "resume")

    assert len(done) == 6 - len(before)
    assert finished.counts.rows == 60
    assert finished.num_kept == 10 * len(before)
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("part-*")}
    assert before.items() <= after.items(), "finished parts were written again"
    assert hashes(tmp_path / "out") == hashes(tmp_path / "calm")
    assert read_json(str(tmp_path / "out"), "_manifest.json")["counts"]["rows"] == 60
    assert verify_output(str(tmp_path / "out"), 0).problems == []


@on_ray
@pytest.mark.slow
def test_a_finished_job_has_nothing_to_do(tmp_path: Path) -> None:
    """Case O17: and touches nothing."""
    job = echo_job(source_of(tmp_path), tmp_path / "out", **SETTINGS)
    finish(job)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*") if p.is_file()}

    done, finished = finish(job, "resume")

    assert (done, finished.seconds, finished.num_tokens) == ([], 0.0, 0)
    assert finished.counts.failed == {"null_prompt": 1}
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*") if p.is_file()} == before


@on_ray
@pytest.mark.slow
def test_resuming_what_was_never_begun_begins_it(tmp_path: Path) -> None:
    """So that a script can always say --resume."""
    job = echo_job(source_of(tmp_path), tmp_path / "out", **SETTINGS)

    done, _ = finish(job, "resume")

    assert sorted(done) == list(range(6))


@on_ray
@pytest.mark.slow
def test_parts_that_are_not_whole_are_done_again(tmp_path: Path) -> None:
    """Case O11, and a part that somebody has deleted."""
    job = echo_job(source_of(tmp_path), tmp_path / "out", **SETTINGS)
    finish(job)
    calm, out = hashes(tmp_path / "out"), tmp_path / "out"
    (out / "part-00001.parquet").unlink()
    os.truncate(out / "part-00003.parquet", 100)
    (out / "_records" / "part-00004.json").unlink()
    (out / "_SUCCESS").unlink()

    done, _ = finish(job, "resume")

    assert sorted(done) == [1, 3, 4]
    assert hashes(out) == calm


OTHER_JOBS = {
    "temperature": ({"temperature": 0.5}, "temperature was 1.0, is now 0.5"),
    "seed": ({"seed": 6}, "seed was 5, is now 6"),
    "max_new_tokens": ({"max_new_tokens": 5}, "max_new_tokens was 4, is now 5"),
    "rows_per_batch": ({"rows_per_batch": 3}, "rows_per_batch was 4, is now 3"),
    "rows_per_shard": ({"rows_per_shard": 20}, "rows_per_shard was 10, is now 20"),
    "logprobs": ({"logprobs": None}, "logprobs was 2, is now null"),
    "format": ({"output_format": "arrow"}, 'output_format was "parquet", is now "arrow"'),
    "limit": ({"limit": 50}, "rows was 60, is now 50"),
}


@pytest.mark.parametrize("changed", OTHER_JOBS)
def test_another_jobs_folder_is_refused_with_both_values(tmp_path: Path, changed: str) -> None:
    """Case J02."""
    source = source_of(tmp_path)
    run_here(echo_job(source, tmp_path / "out", **SETTINGS))
    before = hashes(tmp_path / "out")
    settings, words = OTHER_JOBS[changed]

    with pytest.raises(RefusedError, match="rows of another job") as caught:
        finish(echo_job(source, tmp_path / "out", **SETTINGS | settings), "resume")

    assert words in str(caught.value)
    assert hashes(tmp_path / "out") == before


def test_another_model_is_refused(tmp_path: Path) -> None:
    job = echo_job(source_of(tmp_path), tmp_path / "out", **SETTINGS)
    run_here(job)

    with pytest.raises(RefusedError, match='model was "echo", is now "other"'):
        finish(dataclasses.replace(job, model=ModelRef("other", engine="echo")), "resume")


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    """Case J02: a file added, edited, or written again with the same rows."""
    folder = tmp_path / "in"
    first = write_prompts(folder / "a.parquet", ["a", "b"])
    job = echo_job(folder, tmp_path / "out", **SETTINGS)
    run_here(job)

    write_prompts(folder / "b.parquet", ["c"])
    with pytest.raises(RefusedError, match=r"input file b\.parquet was not there, is now"):
        finish(job, "resume")
    (folder / "b.parquet").unlink()
    write_prompts(first, ["a", "c"])
    with pytest.raises(RefusedError, match=r"input file a\.parquet: mtime_ns was"):
        finish(job, "resume")


@on_ray
@pytest.mark.slow
def test_where_it_runs_may_change(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    run_here(echo_job(source, tmp_path / "calm", **SETTINGS))
    job = echo_job(source, tmp_path / "out", **SETTINGS)
    break_off(job, 2)

    for _ in run_job(job, Placement(num_workers=2, cpus_per_worker=0.5), start="resume"):
        pass

    assert hashes(tmp_path / "out") == hashes(tmp_path / "calm")


@on_ray
@pytest.mark.slow
def test_overwriting_deletes_the_other_job_and_keeps_nothing_of_it(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    finish(echo_job(source, tmp_path / "out", **SETTINGS))

    finish(echo_job(source, tmp_path / "out", limit=20, **SETTINGS), "overwrite")

    assert read_rows(tmp_path / "out").num_rows == 20
    assert sorted(os.listdir(tmp_path / "out" / "_records")) == [
        "part-00000.json", "part-00001.json",
    ]  # fmt: skip
    assert verify_output(str(tmp_path / "out"), 0).problems == []


def test_what_is_no_jobs_folder_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    pq.write_table(pa.table({"x": [1]}), tmp_path / "out" / "part-00000.parquet")

    with pytest.raises(RefusedError, match=r"holds part-00000\.parquet, and no _job\.json"):
        finish(echo_job(source_of(tmp_path), tmp_path / "out"), "resume")


@on_ray
@pytest.mark.slow
def test_a_run_that_is_told_to_stop_says_how_far_it_came(tmp_path: Path) -> None:
    job, stop = echo_job(source_of(tmp_path), tmp_path / "out", **SETTINGS), Stop()

    with pytest.raises(StoppedError, match=r"of 6 shards are finished. Go on with --resume"):
        for report in run_job(job, ONE, stop=stop):
            if isinstance(report, ShardReport):
                stop.ask()

    assert not (tmp_path / "out" / "_SUCCESS").exists()
    assert not (tmp_path / "out" / "_owner.json").exists()
    done, _ = finish(job, "resume")
    assert len(done) < 6


@on_ray
@pytest.mark.slow
def test_a_run_ends_early_when_too_many_rows_are_errors(tmp_path: Path) -> None:
    """Case J07: 1 % is bad; limits 0, 5 and 100."""
    prompts = [None if i % 100 == 3 else f"{i}" for i in range(1000)]
    source = write_prompts(tmp_path / "in.parquet", prompts)
    settings = {"rows_per_shard": 100, "rows_per_batch": 100}
    job = echo_job(source, tmp_path / "out", **settings)

    with pytest.raises(WorkerError, match=r"1 rows are errors, and --max-errors is 0: null_prompt"):
        finish(job, max_errors="0")
    with pytest.raises(WorkerError, match="6 rows are errors, and --max-errors is 5"):
        finish(job, "resume", max_errors="5")
    with pytest.raises(WorkerError, match=r"6 rows are errors, and --max-errors is 0.5%"):
        finish(job, "resume", max_errors="0.5%")
    _, finished = finish(job, "resume", max_errors="1%")

    assert finished.counts.failed == {"null_prompt": 10}
    assert finished.num_kept >= 600


@on_ray
@pytest.mark.slow
def test_a_job_without_a_single_answer_has_failed(tmp_path: Path) -> None:
    """Case O17: all rows fail."""
    source = write_prompts(tmp_path / "in.parquet", [None, ""])
    job = echo_job(source, tmp_path / "out")

    for start in ("new", "resume"):
        with pytest.raises(WorkerError, match="not one of 2 rows was answered: empty_prompt 1"):
            finish(job, start)

    assert not (tmp_path / "out" / "_SUCCESS").exists()
    assert read_rows(tmp_path / "out").num_rows == 2


@on_ray
@pytest.mark.slow
def test_rows_whose_error_may_pass_are_tried_again_and_all_else_stays(tmp_path: Path) -> None:
    """Case J26: five rows fail, two of them for good."""
    prompts = [f"{i}" for i in range(40)]
    prompts[3] = prompts[4] = prompts[25] = "<huge>"
    prompts[5] = prompts[35] = ""
    source = write_prompts(tmp_path / "in.parquet", prompts)
    settings = {**SETTINGS, "rows_per_batch": 1}
    faulty = dataclasses.replace(
        echo_job(source, tmp_path / "out", **settings), model=ModelRef("faulty", engine="echo")
    )
    finish(faulty)
    before, old = hashes(tmp_path / "out"), read_rows(tmp_path / "out")

    done, finished = finish(faulty, "retry_failed")

    assert sorted(done) == [0, 2]
    assert finished.counts.failed == {"out_of_memory": 3, "empty_prompt": 2}
    assert hashes(tmp_path / "out") == before, "it failed again, in the same way"
    assert read_rows(tmp_path / "out").equals(old)
    assert verify_output(str(tmp_path / "out"), 0).problems == []


def test_there_must_be_something_to_try_again(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="holds no job whose rows could be tried again"):
        finish(echo_job(source_of(tmp_path), tmp_path / "out"), "retry_failed")


def test_the_intent_says_what_was_settled(tmp_path: Path) -> None:
    job = echo_job(source_of(tmp_path), tmp_path / "out", **SETTINGS)
    run_here(job)

    intent = json.loads((tmp_path / "out" / "_job.json").read_text())

    assert intent["identity"]["version of pyarrow"] == pa.__version__
    assert intent["identity"]["temperature"] == 1.0
    assert len(intent["fingerprint"]) == 64


def test_what_the_defaults_add_may_as_well_be_given(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    job = echo_job(source, tmp_path / "out", **SETTINGS)
    run_here(job)
    spelled = dataclasses.replace(
        job, sampling=Sampling(4, temperature=1.0, top_k=-1, top_p=1.0, seed=5)
    )

    done, _ = finish(spelled, "resume")

    assert done == []
