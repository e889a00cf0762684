"""The pool on a local Ray: every shard once, the same bytes for any workers, and faults."""

import hashlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from running import echo_job, make_job, prepared, read_rows, run_plan, worker_pids, write_prompts

from cluster.placement import Resources, Seats
from jobs.errors import InputError, ModelError, WorkerError
from jobs.folder import list_parts
from jobs.model import ModelRef
from jobs.plan import Plan
from jobs.report import ShardReport


def run_shards(plan: Plan, seats: Seats) -> Iterator[ShardReport]:
    from cluster.pool import hire_workers

    with hire_workers(plan, seats) as pool:
        yield from pool.run_shards(plan.shards)


def hashes(folder: Path) -> dict[str, str]:
    return {
        os.path.basename(path): hashlib.sha256(Path(path).read_bytes()).hexdigest()
        for path in list_parts(str(folder))
    }


def test_a_session_says_what_there_is(session: Resources) -> None:
    assert session.num_cpus >= 1
    assert session.num_gpus == 0


def test_one_worker_two_and_none_at_all_write_the_same_bytes(
    tmp_path: Path, session: Resources
) -> None:
    prompts = [None if i == 13 else f"{'x' * (i % 37)} {i}" for i in range(60)]
    source = write_prompts(tmp_path / "in.parquet", prompts)
    settings = {
        "temperature": 1.0, "seed": 5, "logprobs": 2, "output_logits": True, "rows_per_shard": 7,
    }  # fmt: skip

    for name, seats in (("one", Seats(1, 1, 0)), ("two", Seats(2, 0.5, 0))):
        plan = prepared(echo_job(source, tmp_path / name, **settings))
        reports = list(run_shards(plan, seats))
        assert sorted(report.shard.index for report in reports) == list(range(9))
        assert {r.part.name: r.part.sha256 for r in reports} == hashes(tmp_path / name)
    run_plan(prepared(echo_job(source, tmp_path / "here", **settings)))

    assert hashes(tmp_path / "one") == hashes(tmp_path / "two") == hashes(tmp_path / "here")
    assert len(hashes(tmp_path / "one")) == 9


def test_a_model_that_cannot_be_loaded_fails_the_job_with_its_own_message(
    tmp_path: Path, session: Resources, models: dict[str, str]
) -> None:
    """Case J25: not tried for ever."""
    folder = shutil.copytree(models["emoji"], tmp_path / "model")
    source = write_prompts(tmp_path / "in.parquet", ["a"])
    plan = prepared(make_job(source, tmp_path / "out", ModelRef(str(folder))))
    (folder / "config.json").unlink()

    with pytest.raises(ModelError, match="the model cannot be loaded"):
        list(run_shards(plan, Seats(2, 0.5, 0)))


def test_an_error_of_a_shard_fails_the_job_and_says_what_to_do(
    tmp_path: Path, session: Resources
) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a", "b"])
    plan = prepared(echo_job(source, tmp_path / "out"))
    write_prompts(source, ["a", "b", "c"])

    with pytest.raises(InputError, match="the file has changed since the job was planned"):
        list(run_shards(plan, Seats(1, 1, 0)))
    assert list_parts(str(tmp_path / "out")) == []


def test_a_killed_workers_shard_is_done_by_another(
    tmp_path: Path, session: Resources, caplog: pytest.LogCaptureFixture
) -> None:
    """Case J04: the only worker of a run."""
    source = write_prompts(tmp_path / "in.parquet", [f"{i}" for i in range(40)])
    settings = {"rows_per_shard": 4, "max_new_tokens": 300, "ignore_eos": True}
    plan = prepared(echo_job(source, tmp_path / "out", **settings))

    reports = run_shards(plan, Seats(1, 1, 0))
    next(reports)
    for pid in worker_pids(os.getpid()):
        os.kill(pid, signal.SIGKILL)
    rest = list(reports)

    assert len(rest) == 9
    assert "worker lost on shard" in caplog.text
    assert read_rows(tmp_path / "out")["row_id"].to_pylist() == list(range(40))


@pytest.mark.slow
def test_workers_that_all_die_while_they_start_end_the_job(
    tmp_path: Path, session: Resources
) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a"])
    plan = prepared(echo_job(source, tmp_path / "out"))
    stop = threading.Event()

    def kill_whatever_runs() -> None:
        while not stop.wait(0.05):
            for pid in worker_pids(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_whatever_runs)
    killer.start()
    try:
        with pytest.raises(WorkerError, match="3 workers were lost while it was starting"):
            list(run_shards(plan, Seats(1, 1, 0)))
    finally:
        stop.set()
        killer.join()
    assert list_parts(str(tmp_path / "out")) == []


def test_no_worker_is_left_when_a_run_is_given_up(tmp_path: Path, session: Resources) -> None:
    source = write_prompts(tmp_path / "in.parquet", [f"{i}" for i in range(40)])
    plan = prepared(echo_job(source, tmp_path / "out", rows_per_shard=4, max_new_tokens=300))

    reports = run_shards(plan, Seats(2, 0.5, 0))
    next(reports)
    reports.close()

    for _ in range(100):
        if not worker_pids(os.getpid()):
            break
        time.sleep(0.1)
    assert worker_pids(os.getpid()) == []
