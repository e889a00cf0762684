"""Reading ahead and writing behind: both overlap with generating, and neither changes a thing."""

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import echo_job, make_job, open_worker, prepared, read_rows, write_prompts

from jobs.completion import RowError
from jobs.drafts import PartWriter
from jobs.errors import InputError, MemoryShortError, OutputError
from jobs.folder import list_parts
from jobs.lessons import Lessons
from jobs.model import ModelRef
from jobs.plan import Plan
from workers.reader import Reading
from workers.worker import Worker

SECONDS = 60
"Nothing here takes so long: what waits so long waits for ever."
ROW_BYTES = 4 * 257 * 4
"Logits of a row of four tokens."


def shards_of(folder: Path, prompts: list[str], **settings: object) -> Plan:
    """Two rows a shard, on the engine that plays faults when a prompt asks for them."""
    source = write_prompts(folder / "in.parquet", prompts)
    job = make_job(
        source, folder / "out", ModelRef("faulty", engine="echo"), rows_per_shard=2, **settings
    )
    return prepared(job)


def watch(
    monkeypatch: pytest.MonkeyPatch, worker: Worker, name: str, before: Callable[[Any], None]
) -> None:
    """Has something happen before each call of the engine, with what it is called for."""
    method = getattr(worker._engine, name)

    def watched(first: Any, *rest: Any, **named: Any) -> Any:
        before(first)
        return method(first, *rest, **named)

    monkeypatch.setattr(worker._engine, name, watched)


def wait_for(event: Event) -> None:
    assert event.wait(SECONDS), "nothing else goes on meanwhile"


def part_bytes(folder: Path) -> list[bytes]:
    return [Path(path).read_bytes() for path in list_parts(str(folder))]


def test_the_next_shard_is_read_while_this_one_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch waits until the second shard is tokenized; each shard is so once."""
    plan = shards_of(tmp_path, ["a", "b", "c", "d"])
    worker, is_read, encoded = open_worker(plan), Event(), []
    encode = worker._engine.encode

    def note(texts: list[str], **named: Any) -> Any:
        ids = encode(texts, **named)
        encoded.append(texts)
        if texts == ["c", "d"]:
            is_read.set()
        return ids

    monkeypatch.setattr(worker._engine, "encode", note)
    watch(monkeypatch, worker, "generate", lambda batch: wait_for(is_read))

    worker.run_shard(plan.shards[0], ahead=plan.shards[1])
    worker.run_shard(plan.shards[1])

    assert encoded == [["a", "b"], ["c", "d"]]
    assert read_rows(tmp_path / "out")["prompt"].to_pylist() == ["a", "b", "c", "d"]


def test_a_wrong_guess_costs_the_read_and_nothing_else(tmp_path: Path) -> None:
    plan = shards_of(tmp_path, [f"prompt {i}" for i in range(8)])
    plain = shards_of(tmp_path / "plain", [f"prompt {i}" for i in range(8)])
    worker, other = open_worker(plan), open_worker(plain)

    for index, guess in ((0, 3), (2, 0), (1, 1), (3, 2)):
        worker.run_shard(plan.shards[index], ahead=plan.shards[guess])
    for shard in plain.shards:
        other.run_shard(shard)

    assert part_bytes(tmp_path / "out") == part_bytes(tmp_path / "plain" / "out")


@pytest.mark.parametrize(
    ("word", "error"), [("<encode>", RuntimeError), ("<memory in encode>", MemoryShortError)]
)
def test_what_is_wrong_with_a_shard_is_said_when_it_is_run_itself(
    tmp_path: Path, word: str, error: type[Exception]
) -> None:
    prompts = [f"prompt {i}" for i in range(9)]
    prompts[4] += word
    source = write_prompts(tmp_path / "in.parquet", prompts)
    job = make_job(source, tmp_path / "out", ModelRef("faulty", engine="echo"), rows_per_shard=3)
    plan = prepared(job)
    worker, (first, second, third) = open_worker(plan), plan.shards

    worker.run_shard(first, ahead=second)
    with pytest.raises(error):
        worker.run_shard(second, ahead=third)
    worker.run_shard(third)

    assert len(list_parts(str(tmp_path / "out"))) == 2


def test_input_that_cannot_be_read_is_said_of_its_own_shard(tmp_path: Path) -> None:
    for name in ("0", "1"):
        write_prompts(tmp_path / "in" / f"{name}.parquet", [f"{name}a", f"{name}b"])
    plan = prepared(echo_job(tmp_path / "in", tmp_path / "out", rows_per_shard=2))
    worker, (first, second) = open_worker(plan), plan.shards
    os.unlink(tmp_path / "in" / "1.parquet")

    worker.run_shard(first, ahead=second)

    with pytest.raises(InputError, match=r"1\.parquet: cannot be read"):
        worker.run_shard(second)


def test_input_that_could_not_be_read_ahead_is_read_again_in_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails beside another shard may not fail alone."""
    for name in ("0", "1"):
        write_prompts(tmp_path / "in" / f"{name}.parquet", [f"{name}a", f"{name}b"])
    plan = prepared(echo_job(tmp_path / "in", tmp_path / "out", rows_per_shard=2))
    worker, (first, second), moved = open_worker(plan), plan.shards, tmp_path / "moved"
    os.rename(tmp_path / "in" / "1.parquet", moved)

    def wait_until_read(batch: object) -> None:
        if worker._reader._ahead is not None:
            assert worker._reader._ahead[1].exception(SECONDS) is not None

    watch(monkeypatch, worker, "generate", wait_until_read)
    worker.run_shard(first, ahead=second)
    os.rename(moved, tmp_path / "in" / "1.parquet")
    worker.run_shard(second)

    assert read_rows(tmp_path / "out")["prompt"].to_pylist() == ["0a", "0b", "1a", "1b"]


def test_a_shard_that_hangs_while_it_is_read_ahead_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = shards_of(tmp_path, [f"prompt {i}" for i in range(10)])
    worker, is_over, is_hung, waited = open_worker(plan), Event(), Event(), []

    def hang(texts: list[str]) -> None:
        if "prompt 2" in texts:
            is_hung.set()
            waited.append(is_over.wait(SECONDS))

    watch(monkeypatch, worker, "encode", hang)
    watch(monkeypatch, worker, "generate", lambda batch: wait_for(is_hung))
    try:
        worker.run_shard(plan.shards[0], ahead=plan.shards[1])
        worker.run_shard(plan.shards[2], ahead=plan.shards[3])
        worker.run_shard(plan.shards[3], ahead=plan.shards[4])
        assert waited == []
    finally:
        is_over.set()

    assert len(list_parts(str(tmp_path / "out"))) == 3


def test_one_shard_is_held_ahead_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guesses that are wrong, trials and lessons drop what was read, before they read."""
    plan = shards_of(tmp_path, [f"prompt {i}" for i in range(10)])
    worker, held, held_before = open_worker(plan), [], []

    def count(batch: object) -> None:
        if worker._reader._ahead is not None:
            worker._reader._ahead[1].result(SECONDS)
        held.append(num_readings())

    def count_before(texts: list[str]) -> None:
        if texts == ["prompt 6", "prompt 7"]:
            held_before.append(num_readings())

    def num_readings() -> int:
        return sum(type(thing) is Reading for thing in gc.get_objects())

    watch(monkeypatch, worker, "generate", count)
    watch(monkeypatch, worker, "encode", count_before)
    zero, one, two, three, four = plan.shards
    worker.run_shard(zero, ahead=one)
    worker.run_shard(one, ahead=two)
    worker.run_shard(three, ahead=four)
    worker.try_rows(two, 4, 6)
    worker.run_shard(two, ahead=four)
    worker.run_shard(four, Lessons(halvings=1))

    assert held == [2, 2, 2, 0, 2, 1]  # A trial holds the prompts alone.
    assert held_before == [0]


def test_what_lessons_say_counts_more_than_what_was_read_ahead(tmp_path: Path) -> None:
    plan = shards_of(tmp_path, ["a", "b", "c", "d"])
    worker = open_worker(plan)
    error = RowError("generate", "worker_crash", "It died.")

    worker.run_shard(plan.shards[0], ahead=plan.shards[1])
    report = worker.run_shard(plan.shards[1], Lessons(((2, error),)))

    assert dict(report.counts.failed) == {"worker_crash": 1}


def test_a_reader_that_has_raised_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands in the middle of things: Arrow said that there were no more rows."""
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b", "c", "d"]}), source, row_group_size=2)
    plan = prepared(echo_job(source, tmp_path / "out", rows_per_shard=2))
    worker, (first, second) = open_worker(plan), plan.shards
    content, times = source.read_bytes(), source.stat()
    start = pq.ParquetFile(source).metadata.row_group(1).column(0).dictionary_page_offset

    def write_with_its_time(changed: bytes) -> None:
        source.write_bytes(changed)
        os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))

    def wait_until_read(batch: object) -> None:
        if worker._reader._ahead is not None:
            assert isinstance(worker._reader._ahead[1].exception(SECONDS), InputError)

    write_with_its_time(content[:start] + b"\xff" * 20 + content[start + 20 :])
    watch(monkeypatch, worker, "generate", wait_until_read)
    worker.run_shard(first, ahead=second)
    write_with_its_time(content)
    worker.run_shard(second)

    assert read_rows(tmp_path / "out")["prompt"].to_pylist() == ["a", "b", "c", "d"]


def test_seconds_of_reading_are_its_own_and_those_of_waiting_are_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a second is far more than it takes to be given what was read meanwhile."""
    plan = shards_of(tmp_path, ["a", "b", "c", "d"])
    worker = open_worker(plan)

    def wait_until_read(batch: object) -> None:
        if worker._reader._ahead is not None:
            worker._reader._ahead[1].result(SECONDS)

    watch(monkeypatch, worker, "encode", lambda texts: time.sleep(0.5))
    watch(monkeypatch, worker, "generate", wait_until_read)

    first = worker.run_shard(plan.shards[0], ahead=plan.shards[1]).counts
    second = worker.run_shard(plan.shards[1]).counts

    assert first.read_wait_seconds >= first.tokenize_seconds >= 0.5
    assert second.tokenize_seconds >= 0.5 > second.read_wait_seconds


def logits_plan(folder: Path, num_rows: int, budget: float, **settings: object) -> Plan:
    """One shard of rows with logits; budget in rows."""
    source = write_prompts(folder / "in.parquet", [f"{i}" for i in range(num_rows)])
    return prepared(
        echo_job(source, folder / "out", output_logits=True, ignore_eos=True,
                 rows_per_shard=num_rows, logits_budget_bytes=int(budget * ROW_BYTES), **settings)
    )  # fmt: skip


def spy(monkeypatch: pytest.MonkeyPatch, worker: Worker, on_write: Callable[[], None]) -> list[str]:
    """What happens, in order: batches that begin, and stretches that are written."""
    said: list[str] = []
    append = PartWriter.append

    def write(writer: PartWriter, table: Any) -> None:
        on_write()
        append(writer, table)
        said.append("written")

    monkeypatch.setattr(PartWriter, "append", write)
    watch(monkeypatch, worker, "generate", lambda batch: said.append("begun"))
    return said


def test_a_batch_is_written_while_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is not written before the second has begun. The third waits for the first."""
    plan = logits_plan(tmp_path, 4, budget=2)
    worker = open_worker(plan)

    def wait_for_the_second() -> None:
        until = time.monotonic() + SECONDS
        while said.count("begun") < 2:
            assert time.monotonic() < until, "the second waits for the first to be written"
            time.sleep(0.01)

    said = spy(monkeypatch, worker, wait_for_the_second)

    report = worker.run_shard(plan.shards[0])

    assert report.counts.batches == 4
    for number in (2, 3):
        begun = [place for place, what in enumerate(said) if what == "begun"][number]
        assert said[:begun].count("written") >= number - 1


@pytest.mark.parametrize(
    ("budget", "lessons"), [(1.9, Lessons()), (2, Lessons(halvings=1))], ids=["budget", "halved"]
)
def test_where_two_batches_do_not_fit_each_is_written_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: float, lessons: Lessons
) -> None:
    plan = logits_plan(tmp_path, 4, budget)
    worker = open_worker(plan)
    said = spy(monkeypatch, worker, lambda: time.sleep(0.05))

    worker.run_shard(plan.shards[0], lessons)

    assert said == ["begun", "written"] * 4


def test_writing_behind_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same batches, written behind and at once."""
    behind, at_once = (logits_plan(tmp_path / name, 6, budget=4) for name in ("a", "b"))
    worker = open_worker(at_once)
    monkeypatch.setattr(worker._behind, "append", lambda writer, make: writer.append(make()))

    report = open_worker(behind).run_shard(behind.shards[0])
    worker.run_shard(at_once.shards[0])

    assert (behind.is_written_behind, report.counts.batches) == (True, 3)
    assert part_bytes(tmp_path / "a" / "out") == part_bytes(tmp_path / "b" / "out")


@pytest.mark.parametrize("failing", [0, 2, 3])
def test_what_cannot_be_written_is_said_of_its_own_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The first, one in the middle, and the last, after which nothing is generated."""
    plan = logits_plan(tmp_path, 4, budget=2)
    worker, numbers = open_worker(plan), iter(range(100))

    def fail() -> None:
        if next(numbers) == failing:
            raise OutputError("the disk is full")

    spy(monkeypatch, worker, fail)

    with pytest.raises(OutputError, match="the disk is full"):
        worker.run_shard(plan.shards[0])
    assert [name for name in os.listdir(tmp_path / "out") if "part" in name] == []
    report = worker.run_shard(plan.shards[0])

    assert (report.counts.rows, report.part.num_rows) == (4, 4)


def test_what_is_being_written_is_waited_for_when_a_batch_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the draft would be closed under the hands of the thread that writes it."""
    plan = logits_plan(tmp_path, 4, budget=2)
    worker, has_failed = open_worker(plan), Event()
    said = spy(monkeypatch, worker, lambda: has_failed.wait(SECONDS) and time.sleep(0.2))

    def fail_second(batch: object) -> None:
        if said.count("begun") == 1:
            has_failed.set()
            raise RuntimeError("a kernel failed")

    watch(monkeypatch, worker, "generate", fail_second)

    with pytest.raises(RuntimeError, match="a kernel failed"):
        worker.run_shard(plan.shards[0])
    assert said == ["begun", "written"]
    assert [name for name in os.listdir(tmp_path / "out") if "part" in name] == []


def test_a_batch_that_does_not_fit_beside_what_is_written_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be an error row, or halve the shard's batches, for memory that is soon free."""
    plan = logits_plan(tmp_path / "tight", 4, budget=2)
    calm = logits_plan(tmp_path / "calm", 4, budget=2)
    worker = open_worker(plan)
    said = spy(monkeypatch, worker, lambda: None)

    def run_short(batch: object) -> None:
        if worker._behind.is_busy:
            raise MemoryError("no room")

    watch(monkeypatch, worker, "generate", run_short)
    report = worker.run_shard(plan.shards[0])
    monkeypatch.undo()
    open_worker(calm).run_shard(calm.shards[0])

    assert said == ["begun", "written"] * 4
    assert report.counts.failed_rows == 0
    assert part_bytes(tmp_path / "tight" / "out") == part_bytes(tmp_path / "calm" / "out")


def test_a_row_that_does_not_fit_with_nothing_beside_it_is_still_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = logits_plan(tmp_path, 3, budget=2)
    worker = open_worker(plan)

    def run_short(batch: list[Any]) -> None:
        if batch[0].row_id == 1:
            raise MemoryError("no room")

    watch(monkeypatch, worker, "generate", run_short)

    report = worker.run_shard(plan.shards[0])

    assert dict(report.counts.failed) == {"out_of_memory": 1}
