"""Rows that end their worker, raise, hang, or do not fit: each costs itself and no other row."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import batchwright, open_worker, prepared, read_rows, worker_pids, write_prompts
from running import make_job as make_any_job

from cluster.placement import Resources, Seats
from jobs.completion import RowError
from jobs.job import Job
from jobs.lessons import Lessons
from jobs.model import ModelRef
from jobs.plan import Plan
from jobs.report import Counts, ShardReport
from jobs.tolerance import Tolerance

FAULTY = ModelRef("faulty", engine="echo")


def make_job(folder: Path, name: str, prompts: list[str], **settings: object) -> Job:
    """A job on the engine that plays faults when a prompt asks for them."""
    source = write_prompts(folder / f"{name}.parquet", prompts)
    settings = {"rows_per_shard": 8, "rows_per_batch": 8, "logprobs": 1, **settings}
    return make_any_job(source, folder / name, FAULTY, **settings)


def run(plan: Plan, seats: Seats, tolerance: Tolerance | None = None) -> dict[int, ShardReport]:
    """All reports, by shard."""
    return {report.shard.index: report for report in reports(plan, seats, tolerance)}


def reports(plan: Plan, seats: Seats, tolerance: Tolerance | None = None) -> Iterator[ShardReport]:
    from cluster.pool import hire_workers

    with hire_workers(plan, seats, tolerance=tolerance) as pool:
        yield from pool.run_shards(plan.shards)


def with_one(word: str, place: int, num_rows: int) -> list[str]:
    """Plain prompts, and one that asks for a fault."""
    return [f"{i} {word}" if i == place else f"prompt {i}" for i in range(num_rows)]


def error_of(folder: Path, row_id: int) -> dict[str, object]:
    errors = read_rows(folder)["error"].to_pylist()
    assert [place for place, error in enumerate(errors) if error] == [row_id]
    error: dict[str, object] = errors[row_id]
    return error


@pytest.mark.slow
def test_a_row_that_ends_its_worker_is_an_error_and_all_others_are_answered(
    tmp_path: Path, session: Resources
) -> None:
    """Case J03: 40 rows, one of which makes every worker exit."""
    plan = prepared(make_job(tmp_path, "out", with_one("<exit>", 13, 40)))

    found = run(plan, Seats(2, 0.5, 0))

    assert error_of(tmp_path / "out", 13) == {
        "stage": "generate", "code": "worker_crash", "attempts": 2, "retryable": True,
        "message": "The worker process ended each time this row was answered, the last times "
        "alone.",
    }  # fmt: skip
    assert sum((r.counts for r in found.values()), Counts()).failed == {"worker_crash": 1}
    assert found[1].retryable == 1
    # What is written depends on the shard and on which rows are known to be bad, not on the search.
    again = prepared(make_job(tmp_path, "again", with_one("<exit>", 13, 40)))
    error = RowError(**error_of(tmp_path / "out", 13))
    open_worker(again).run_shard(again.shards[1], Lessons(((13, error),)))
    name = "part-00001.parquet"
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


@pytest.mark.slow
def test_a_row_that_raises_is_an_error_with_what_was_raised(
    tmp_path: Path, session: Resources, caplog: pytest.LogCaptureFixture
) -> None:
    plan = prepared(make_job(tmp_path, "out", with_one("<raise>", 2, 8)))

    run(plan, Seats(1, 1, 0))

    error = error_of(tmp_path / "out", 2)
    assert (error["code"], error["message"]) == ("engine_error", "RuntimeError: a kernel failed")
    assert "a worker failed on shard 0: RuntimeError: a kernel failed" in caplog.text


@pytest.mark.parametrize(("schedule", "num_batches"), [("fixed", 4), ("refill", 1)])
def test_a_batch_that_does_not_fit_is_halved_for_its_shard_alone(
    tmp_path: Path,
    session: Resources,
    caplog: pytest.LogCaptureFixture,
    schedule: str,
    num_batches: int,
) -> None:
    """Case J06: answers as if the batch had been small from the start; later batches are whole.

    Where rows take turns, fewer of them are live at a time.
    """
    prompts = with_one("<memory>", 11, 24)
    plan = prepared(make_job(tmp_path, "out", prompts, schedule=schedule))
    small = prepared(make_job(tmp_path, "small", prompts, rows_per_batch=2, schedule=schedule))
    worker = open_worker(small)

    found = run(plan, Seats(1, 1, 0))
    for shard in small.shards:
        worker.run_shard(shard)

    assert [found[i].lessons.halvings for i in range(3)] == [0, 2, 0]
    assert [found[i].counts.batches for i in range(3)] == [1, num_batches, 1]
    assert [found[i].counts.halved for i in range(3)] == [0, 1, 0]
    assert read_rows(tmp_path / "out").equals(read_rows(tmp_path / "small"))
    assert "shard 1 is out of memory: 8 rows do not fit; the batch is halved" in caplog.text


def test_a_row_that_does_not_fit_alone_is_an_error(tmp_path: Path, session: Resources) -> None:
    plan = prepared(make_job(tmp_path, "out", with_one("<huge>", 3, 8)))

    run(plan, Seats(1, 1, 0))

    error = error_of(tmp_path / "out", 3)
    assert (error["code"], error["retryable"]) == ("out_of_memory", True)


def test_a_row_that_cannot_be_tokenized_is_blamed_on_its_own_shard(
    tmp_path: Path, session: Resources, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails in the worker that answers the shard before, which reads it ahead."""
    plan = prepared(make_job(tmp_path, "out", with_one("<encode>", 11, 24)))

    found = run(plan, Seats(1, 1, 0))

    error = error_of(tmp_path / "out", 11)
    assert (error["code"], error["message"]) == (
        "engine_error", "RuntimeError: the tokenizer failed",
    )  # fmt: skip
    assert [bool(found[i].lessons.errors) for i in range(3)] == [False, True, False]
    assert "on shard 0" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "num_workers", "least"),
    [("<exit in encode>", 1, 1), ("<exit in encode>", 2, 0), ("<hang in encode>", 1, 0)],
)
def test_a_row_that_ends_or_hangs_its_tokenizer_costs_its_neighbours_one_attempt_at_most(
    tmp_path: Path,
    session: Resources,
    caplog: pytest.LogCaptureFixture,
    word: str,
    num_workers: int,
    least: int,
) -> None:
    """Shards take long, so that the one that holds it is read ahead meanwhile."""
    settings = {"max_new_tokens": 400, "ignore_eos": True}
    plan = prepared(make_job(tmp_path, "out", with_one(word, 27, 40), **settings))

    found = run(plan, Seats(num_workers, 1 / num_workers, 0), Tolerance(shard_timeout=15.0))

    error = error_of(tmp_path / "out", 27)
    assert (error["code"], error["attempts"]) == ("worker_crash", 2)
    assert [bool(found[i].lessons.errors) for i in range(5)] == [False, False, False, True, False]
    lost = [line for line in caplog.text.splitlines() if "worker lost on shard" in line]
    others = [line for line in lost if "on shard 3" not in line]
    assert least <= len(others) <= 1
    # Twice whole, the rows of 8, 4 and 2 that hold it, and twice alone.
    assert len(lost) - len(others) <= 2 + 3 + 2


@pytest.mark.slow
def test_a_row_that_hangs_is_found_and_its_worker_ended(tmp_path: Path, session: Resources) -> None:
    """Case J23: one batch sleeps for ever."""
    plan = prepared(make_job(tmp_path, "out", with_one("<hang>", 1, 4)))

    run(plan, Seats(1, 1, 0), Tolerance(shard_timeout=3.0))

    error = error_of(tmp_path / "out", 1)
    assert error["code"] == "worker_crash"
    assert "not answered in time" in str(error["message"])


@pytest.mark.slow
def test_a_worker_that_stands_still_is_replaced(tmp_path: Path, session: Resources) -> None:
    """A stopped process is no dead one: only the clock tells. No row is to blame."""
    settings = {"max_new_tokens": 400, "ignore_eos": True}
    prompts = [f"{i}" for i in range(40)]
    calm = prepared(make_job(tmp_path, "calm", prompts, **settings))
    plan = prepared(make_job(tmp_path, "out", prompts, **settings))
    worker = open_worker(calm)
    for shard in calm.shards:
        worker.run_shard(shard)

    running = reports(plan, Seats(1, 1, 0), Tolerance(shard_timeout=6.0))
    next(running)
    for pid in worker_pids(os.getpid()):
        os.kill(pid, signal.SIGSTOP)
    rest = list(running)

    assert len(rest) == 4
    assert read_rows(tmp_path / "out").equals(read_rows(tmp_path / "calm"))


@pytest.mark.slow
def test_a_worker_that_ray_ends_for_want_of_memory_gets_smaller_batches(tmp_path: Path) -> None:
    """Case J06, from outside: once may be chance, twice is the batch."""
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(memory["MemAvailable"].split()[0]) / int(memory["MemTotal"].split()[0])
    write_prompts(tmp_path / "in.parquet", with_one("<grow>", 5, 24))

    result = batchwright(
        "run", "in.parquet", "out", "--model", "faulty", "--engine", "echo", "--max-new-tokens", 4,
        "--rows-per-shard", 8, "--rows-per-batch", 8, "--num-workers", 1,
        cwd=tmp_path,
        env={
            # Ray ends workers when so much more is used than now.
            "RAY_memory_usage_threshold": f"{1 - free + 0.15:.3f}",
            "RAY_memory_monitor_refresh_ms": "100",
        },
    )  # fmt: skip

    assert result.returncode == 0, result.stderr
    assert "running low on memory" in result.stderr
    assert "1 shard in smaller batches for want of memory" in result.stderr
    assert read_rows(tmp_path / "out")["error"].null_count == 24
