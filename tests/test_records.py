"""Records beside parts tell which are whole; and parts whose failed rows are answered again."""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import echo_job, make_job, open_worker, prepared, read_rows, run_plan, write_prompts

from jobs.checks import Expected, check_part
from jobs.claim import claim_output
from jobs.completion import RowError
from jobs.errors import OutputError, RefusedError
from jobs.folder import RECORDS, list_parts
from jobs.lessons import Lessons
from jobs.model import ModelRef
from jobs.parts import read_part
from jobs.plan import Plan, Shard
from jobs.records import find_finished, read_record, write_record
from jobs.report import Counts, Part, ShardReport
from runner.manifest import read_intent
from runner.run import _check_records
from workers.worker import Worker

FAULTY = ModelRef("faulty", engine="echo")
FORMATS = ["parquet", "arrow"]

REPORT = ShardReport(
    shard=Shard(3, 24, 32),
    part=Part("part-00003.parquet", 8, 1234, "ab" * 32),
    counts=Counts(
        rows=8, failed=Counter(out_of_memory=2, null_prompt=1), truncated=1, out_of_room=2,
        prompt_tokens=40, new_tokens=20, halved=1, batches=4, slot_steps=32, read_seconds=0.1,
        tokenize_seconds=0.2, generate_seconds=0.3, write_seconds=0.4, read_wait_seconds=0.05,
        write_wait_seconds=0.06,
    ),
    seconds=1.5,
    lessons=Lessons(((25, RowError("generate", "worker_crash", "It died.", 2, True)),), 2),
    retryable=2,
    mended=(26, 27),
)  # fmt: skip
"A report with no two numbers that could be mistaken for each other, as far as that goes."


def finished(folder: Path, **settings: object) -> Plan:
    """A plan of three shards, with all its parts."""
    source = write_prompts(folder / "in.parquet", [f"prompt {i}" for i in range(10)])
    plan = prepared(echo_job(source, folder / "out", rows_per_shard=4, **settings))
    run_plan(plan)
    return plan


def whole(plan: Plan) -> list[int]:
    """Numbers of the shards that need not be done again."""
    return [report.shard.index for report in find_finished(plan)]


def check(plan: Plan, shard: Shard, report: ShardReport) -> list[str]:
    """What is wrong with a part, for one who knows no more than the folder says."""
    schema = read_intent(plan.job.output).schema
    expected = Expected(schema, plan.job.output_prefix, set(plan.kept_columns), 0)
    return list(check_part(str(part_path(plan, shard.index)), shard, report, expected))


def part_path(plan: Plan, index: int) -> Path:
    return Path(plan.job.output, f"part-{index:05d}.{plan.job.output_format}")


def record_path(plan: Plan, index: int) -> Path:
    return Path(plan.job.output, RECORDS, f"part-{index:05d}.json")


def count_rows(table: pa.Table) -> Counts:
    """What a table says of itself, without a record."""
    errors, lengths = table["error"].to_pylist(), table["num_generated_tokens"].to_pylist()
    prompts = table["num_prompt_tokens"].to_pylist()
    return Counts(
        rows=table.num_rows,
        failed=Counter(error["code"] for error in errors if error is not None),
        truncated=table["truncated"].to_pylist().count(True),
        prompt_tokens=sum(n for n, error in zip(prompts, errors, strict=True) if error is None),
        new_tokens=sum(n or 0 for n in lengths),
    )


def test_a_record_says_all_that_a_report_says() -> None:
    text = json.dumps(REPORT.record())

    again = ShardReport.from_record(json.loads(text))
    assert again == REPORT
    assert (again.counts + REPORT.counts).failed == Counter(out_of_memory=4, null_prompt=2)


def test_every_field_of_a_report_is_in_its_record() -> None:
    record = REPORT.record()

    assert set(record) == {field.name for field in dataclasses.fields(ShardReport)}
    assert set(record["counts"]) == {f.name for f in dataclasses.fields(Counts)} | {"idle_share"}


def test_a_record_from_before_waiting_was_counted_is_read_as_having_waited_for_nothing() -> None:
    record = json.loads(json.dumps(REPORT.record()))
    del record["counts"]["read_wait_seconds"], record["counts"]["write_wait_seconds"]

    counts = ShardReport.from_record(record).counts

    assert (counts.read_wait_seconds, counts.write_wait_seconds) == (0, 0)
    assert counts == dataclasses.replace(
        REPORT.counts, read_wait_seconds=0.0, write_wait_seconds=0.0
    )


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ShardReport)])
def test_a_record_that_lacks_something_is_none(tmp_path: Path, name: str) -> None:
    write_record(str(tmp_path), REPORT)
    path = tmp_path / RECORDS / "part-00003.json"
    record = json.loads(path.read_text())
    assert read_record(str(tmp_path), REPORT.shard) == REPORT

    del record[name]
    path.write_text(json.dumps(record))

    assert read_record(str(tmp_path), REPORT.shard) is None


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_finished_run_is_found_whole(tmp_path: Path, file_format: str) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["abc", None, "x" * 9000, "d", ""])
    plan = prepared(
        echo_job(source, tmp_path / "out", rows_per_shard=2, output_format=file_format,
                 logprobs=2, output_logits=True, output_prefix="x_")
    )  # fmt: skip
    worker = open_worker(plan)

    reports = [worker.run_shard(shard) for shard in plan.shards]

    assert find_finished(plan) == reports


def test_an_empty_run_is_found_whole(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", [])
    plan = prepared(echo_job(source, tmp_path / "out"))
    assert whole(plan) == []

    run_plan(plan)

    assert whole(plan) == [0]


def test_nothing_is_whole_before_anything_was_written(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a"])

    assert whole(prepared(echo_job(source, tmp_path / "out"))) == []


COLUMNS: dict[str, pa.Array] = {
    "null": pa.nulls(2),
    "bool": pa.array([True, None]),
    "small integers": pa.array([1, 2], pa.uint8()),
    "half": pa.array(np.array([1, 2], np.float16)),
    "decimal": pa.array([Decimal("1.23"), None], pa.decimal128(9, 2)),
    "large decimal": pa.array([Decimal("1.23"), None], pa.decimal256(50, 2)),
    "text": pa.array(["a", None], pa.large_string()),
    "text view": pa.array(["a", None], pa.string_view()),
    "bytes": pa.array([b"ab", None], pa.binary(2)),
    "date": pa.array([1, None], pa.date64()),
    "seconds": pa.array([1, None], pa.time32("s")),
    "time": pa.array([1, None], pa.time64("ns")),
    "moment": pa.array([datetime(2024, 1, 1, tzinfo=UTC)] * 2, pa.timestamp("s", "Europe/Berlin")),
    "nanoseconds": pa.array([1, None], pa.timestamp("ns")),
    "duration": pa.array([1, None], pa.duration("ms")),
    "words": pa.array(["x", "y"]).dictionary_encode(),
    "few words": pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array(["x", "y"])),
    "ordered words": pa.DictionaryArray.from_arrays(
        pa.array([0, 1], pa.int32()), pa.array(["x", "y"]), ordered=True
    ),
    "list": pa.array([[1, 2], None], pa.list_(pa.field("item", pa.int16(), nullable=False))),
    "large list": pa.array([["a"], None], pa.large_list(pa.string())),
    "fixed list": pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)),
    "record": pa.array([{"a": 1, "b": {"c": ["x"]}}, None]),
    "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())),
    "list of maps": pa.array([[[("k", 1)]], None], pa.list_(pa.map_(pa.string(), pa.int64()))),
    "list of words": pa.ListArray.from_arrays(
        pa.array([0, 1, 2], pa.int32()), pa.array(["x", "y"]).dictionary_encode()
    ),
    "id": pa.array([b"\x00" * 16] * 2, pa.uuid()),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int32(), [2]), pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))
    ),
}


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("name", COLUMNS)
def test_a_part_with_whatever_column_of_the_input_is_whole_and_sound(
    tmp_path: Path, file_format: str, name: str
) -> None:
    """A type that came back from the file as another would have its shard done again for ever.

    And verify would call it damaged.
    """
    source = write_prompts(tmp_path / "in.parquet", ["a", "b"], column=COLUMNS[name])
    plan = prepared(echo_job(source, tmp_path / "out", output_format=file_format))

    [shard] = plan.shards
    report = open_worker(plan).run_shard(shard)

    assert find_finished(plan) == [report]
    assert check(plan, shard, report) == []
    assert read_rows(plan.job.output)["column"].to_pylist() == (
        pq.read_table(source)["column"].to_pylist()
    )


@pytest.mark.parametrize("file_format", FORMATS)
def test_fields_with_notes_of_their_own_are_whole(tmp_path: Path, file_format: str) -> None:
    """Spark, Iceberg and others number their fields, and pandas describes its columns."""
    fields = [
        pa.field("id", pa.int64(), nullable=False, metadata={"PARQUET:field_id": "7"}),
        pa.field("prompt", pa.string(), metadata={"PARQUET:field_id": "8", "comment": "text"}),
        pa.field(
            "tags", pa.list_(pa.field("element", pa.string(), metadata={"PARQUET:field_id": "9"}))
        ),
    ]
    schema = pa.schema(fields, metadata={"pandas": "{}"})
    table = pa.table({"id": [1, 2], "prompt": ["a", "b"], "tags": [["x"], None]}, schema=schema)
    pq.write_table(table, tmp_path / "in.parquet")
    plan = prepared(echo_job(tmp_path / "in.parquet", tmp_path / "out", output_format=file_format))

    run_plan(plan)

    assert whole(plan) == [0]


def remove(path: Path) -> None:
    path.unlink()


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def cut_to_nothing(path: Path) -> None:
    path.write_bytes(b"")


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\x00")


def replace_with_noise(path: Path) -> None:
    noise = np.random.default_rng(0).bytes(path.stat().st_size)
    path.write_bytes(noise)


def replace_with_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def lose_the_end(path: Path) -> None:
    """What a loss of power can leave: the right size, and the last block empty."""
    content = path.read_bytes()
    path.write_bytes(content[:-200] + bytes(200))


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [
    remove, cut_short, cut_to_nothing, lengthen, replace_with_noise, replace_with_zeros,
    lose_the_end, become_a_folder,
]  # fmt: skip


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_part_that_is_damaged_is_not_whole(
    tmp_path: Path, file_format: str, damage: Callable[[Path], None]
) -> None:
    """Case O11."""
    plan = finished(tmp_path, output_format=file_format)
    assert whole(plan) == [0, 1, 2]

    damage(part_path(plan, 1))

    assert whole(plan) == [0, 2]


def rewrite(plan: Plan, index: int, change: Callable[[pa.Table], pa.Table]) -> None:
    """Writes a part anew, and its record so that the size is right."""
    path = part_path(plan, index)
    table = change(read_part(str(path)))
    path.unlink()  # Its rows may be mapped still.
    if plan.job.output_format == "arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(table, path)
    record = read_record(plan.job.output, plan.shards[index])
    assert record is not None
    part = dataclasses.replace(record.part, size_bytes=path.stat().st_size)
    write_record(plan.job.output, dataclasses.replace(record, part=part))


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_part_with_other_rows_or_another_schema_is_not_whole(
    tmp_path: Path, file_format: str
) -> None:
    plan = finished(tmp_path, output_format=file_format)
    rewrite(plan, 1, lambda table: table)
    assert whole(plan) == [0, 1, 2], "a part is refused that only was written anew"

    rewrite(plan, 0, lambda table: table.slice(1))
    rewrite(plan, 1, lambda table: table.drop_columns("id"))
    rewrite(plan, 2, lambda table: table.replace_schema_metadata({"other": "job"}))
    assert whole(plan) == []

    run_plan(plan)
    rewrite(plan, 1, lambda t: t.set_column(1, "id", t["id"].cast("int32")))
    assert whole(plan) == [0, 2]


def test_a_part_of_the_other_format_is_not_looked_at(tmp_path: Path) -> None:
    plan = finished(tmp_path)

    part_path(plan, 1).rename(part_path(plan, 1).with_suffix(".arrow"))

    assert whole(plan) == [0, 2]


@pytest.mark.parametrize(
    "content",
    [None, b"", b"{", b"[]", b"null", b"7", b"{}", b'{"shard": 1}', b"\xff\xfe",
     b'{"shard": [1, 4, 8], "part": {}}'],
)  # fmt: skip
def test_a_part_whose_record_cannot_be_read_is_not_whole(
    tmp_path: Path, content: bytes | None
) -> None:
    """Records are not brought to the disk one by one: a loss of power can leave them empty."""
    plan = finished(tmp_path)

    record_path(plan, 1).unlink()
    if content is not None:
        record_path(plan, 1).write_bytes(content)

    assert whole(plan) == [0, 2]


def test_a_record_of_another_shard_is_not_that_of_this_part(tmp_path: Path) -> None:
    plan = finished(tmp_path)

    record_path(plan, 1).write_text(record_path(plan, 0).read_text())

    assert whole(plan) == [0, 2]


def test_shards_that_are_cut_otherwise_are_not_whole(tmp_path: Path) -> None:
    plan = finished(tmp_path)

    assert whole(dataclasses.replace(plan, rows_per_shard=3)) == []


def retry_job(folder: Path, name: str, prompts: list[str | None], **settings: object) -> Plan:
    """A plan of one shard on the engine that plays faults."""
    source = write_prompts(
        folder / f"{name}.parquet",
        prompts,
        word=pa.array([f"w{i % 3}" for i in range(len(prompts))]).dictionary_encode(),
    )
    return prepared(make_job(source, folder / name, FAULTY, rows_per_shard=16, **settings))


def begun(plan: Plan, lessons: Lessons | None = None) -> tuple[Worker, Shard, ShardReport]:
    """A plan of one shard, run for the first time."""
    worker, [shard] = open_worker(plan), plan.shards
    return worker, shard, worker.run_shard(shard, lessons or Lessons())


def no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on there is memory enough."""
    monkeypatch.setattr("workers.engines.faults.play_faults", lambda *_: None)


PROMPTS: list[str | None] = [
    "a", "<huge> 1", "bcd", None, "<huge> 2", "e" * 9000, "fghi", "<huge> 3",
]  # fmt: skip
HUGE = [1, 4, 7]
SETTINGS = {
    "tokens": {},
    "drawn tokens": {"temperature": 1.0, "logprobs": 3},
    "logits": {"output_logits": True, "logprobs": 2},
    "long lists": {"logprobs": 100},
    "prefix": {"output_prefix": "x_", "logprobs": 0},
    "no columns": {"keep": ()},
}


def without_prefix(table: pa.Table) -> pa.Table:
    return table.rename_columns([name.removeprefix("x_") for name in table.column_names])


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("case", SETTINGS)
def test_a_retry_changes_the_failed_rows_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_format: str, case: str
) -> None:
    """Case J26. Rows that can never run are not tried again."""
    settings = {"rows_per_batch": 1, "output_format": file_format, **SETTINGS[case]}
    plan = retry_job(tmp_path, "out", PROMPTS, **settings)
    worker, shard, first = begun(plan)
    before = read_rows(plan.job.output)

    no_faults(monkeypatch)
    report = worker.retry_shard(shard)

    after = read_rows(plan.job.output)
    assert first.retryable == 3
    assert report.retryable == 0
    assert after.schema.equals(before.schema, check_metadata=True)
    kept = [place for place in range(len(PROMPTS)) if place not in HUGE]
    assert after.take(kept).equals(before.take(kept))
    errors = [error and error["code"] for error in without_prefix(after)["error"].to_pylist()]
    assert errors == [
        None, None, None, "null_prompt", None, "context_length_exceeded", None, None,
    ]  # fmt: skip
    undisturbed = retry_job(tmp_path, "undisturbed", PROMPTS, **settings)
    open_worker(undisturbed).run_shard(shard)
    assert after.equals(read_rows(undisturbed.job.output))
    assert whole(plan) == [0]
    assert find_finished(plan) == [report]


def agree(counts: Counts, table: pa.Table) -> None:
    """Asserts that counts are those of a table."""
    found = count_rows(table)
    for name in ("rows", "failed", "truncated", "prompt_tokens", "new_tokens"):
        assert getattr(counts, name) == getattr(found, name), name


@pytest.mark.parametrize("is_truncated", [False, True])
def test_counts_after_a_retry_are_those_of_the_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_truncated: bool
) -> None:
    """With truncation some of the failed rows have been counted as truncated before."""
    settings = {"truncation": "left", "max_model_len": 12} if is_truncated else {}
    prompts = ["a", "xxxxxxxxx<huge>", "b" * 40, None, "<huge>"]
    plan = retry_job(tmp_path, "out", prompts, rows_per_batch=1, **settings)
    worker, shard, first = begun(plan)
    agree(first.counts, read_rows(plan.job.output))
    assert first.counts.failed == {"out_of_memory": 2, "null_prompt": 1}
    assert first.counts.truncated == 2 * is_truncated

    no_faults(monkeypatch)
    report = worker.retry_shard(shard)

    agree(report.counts, read_rows(plan.job.output))
    assert report.counts.failed == {"null_prompt": 1}
    assert report.counts.batches == first.counts.batches + 2
    assert report.counts.slot_steps >= report.counts.new_tokens


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_retry_that_fails_again_keeps_everything(tmp_path: Path, file_format: str) -> None:
    plan = retry_job(tmp_path, "out", PROMPTS, rows_per_batch=1, output_format=file_format)
    worker, shard, first = begun(plan)
    before = read_rows(plan.job.output)

    for _ in range(2):
        report = worker.retry_shard(shard)

        assert read_rows(plan.job.output).equals(before)
        assert report.retryable == first.retryable == 3
        assert report.counts.failed == first.counts.failed
        agree(report.counts, before)
        assert find_finished(plan) == [report]


def test_a_retry_that_succeeds_in_part_counts_what_is_left(tmp_path: Path) -> None:
    """The rows that are left can be tried again another time."""
    plan = retry_job(tmp_path, "out", ["a", "b", "<huge>", "c"], rows_per_batch=1)
    worker = open_worker(plan)
    [shard] = plan.shards
    error = RowError("generate", "worker_crash", "It died.", attempts=2, retryable=True)
    first = worker.run_shard(shard, Lessons(((1, error),)))
    assert first.retryable == 2

    report = worker.retry_shard(shard)

    agree(report.counts, read_rows(plan.job.output))
    assert report.counts.failed == {"out_of_memory": 1}
    assert report.retryable == 1


def test_a_retry_learns_of_rows_that_end_their_worker(tmp_path: Path) -> None:
    plan = retry_job(tmp_path, "out", ["a", "<huge>", "b"], rows_per_batch=1)
    worker, shard, _ = begun(plan)

    error = RowError("generate", "worker_crash", "It died.", attempts=2, retryable=True)
    report = worker.retry_shard(shard, Lessons(((1, error),)))

    assert read_rows(plan.job.output)["error"][1].as_py() == dataclasses.asdict(error)
    assert report.counts.failed == {"worker_crash": 1}
    assert report.retryable == 1


def test_a_shard_without_failed_rows_is_not_changed_by_a_retry(tmp_path: Path) -> None:
    plan = retry_job(tmp_path, "out", ["a", None, "b"])
    worker, shard, first = begun(plan)
    before = read_rows(plan.job.output)

    report = worker.retry_shard(shard)

    assert read_rows(plan.job.output).equals(before)
    assert (report.counts.rows, report.counts.failed) == (3, first.counts.failed)
    assert report.counts.batches == first.counts.batches


@pytest.mark.parametrize("damage", ["no record", "another byte"])
def test_a_retry_of_a_part_that_is_not_what_was_written_does_all_of_it_again(
    tmp_path: Path, damage: str
) -> None:
    """Else a damaged row would be copied, and have a new checksum that says it is sound."""
    plan = retry_job(tmp_path, "out", ["a", "<huge>", "b"], rows_per_batch=1)
    worker, shard, first = begun(plan)
    content = part_path(plan, 0).read_bytes()
    if damage == "no record":
        record_path(plan, 0).unlink()
    else:
        part_path(plan, 0).write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])

    report = worker.retry_shard(shard)

    assert part_path(plan, 0).read_bytes() == content
    assert (report.part, report.mended) == (first.part, ())


def test_a_retry_that_is_broken_off_leaves_the_part_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = retry_job(tmp_path, "out", ["a", "<huge>", "b"], rows_per_batch=1)
    worker, shard, first = begun(plan)
    content = part_path(plan, 0).read_bytes()

    def fail(*_: object) -> None:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr("workers.engines.faults.play_faults", fail)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        worker.retry_shard(shard)

    assert part_path(plan, 0).read_bytes() == content
    assert find_finished(plan) == [first]
    assert not [name for name in os.listdir(plan.job.output) if name.endswith(".draft")]


@pytest.mark.parametrize("step", ["jobs.drafts.PartWriter.commit", "workers.worker.write_record"])
def test_a_retry_that_dies_around_its_rename_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The old record is gone by then and the new one not there: the shard is done again.

    Else the part that is there, old or new, would pass for what the other record says.
    """
    plan = retry_job(tmp_path, "out", ["a", "<huge>", "b"], rows_per_batch=1)
    worker, shard, _ = begun(plan)
    before = read_rows(plan.job.output)

    no_faults(monkeypatch)
    with monkeypatch.context() as patch, pytest.raises(OutputError, match="the power is gone"):
        patch.setattr(step, lose_power)
        worker.retry_shard(shard)

    kept = [0, 2]
    assert read_rows(plan.job.output).take(kept).equals(before.take(kept))
    assert whole(plan) == []
    assert not record_path(plan, 0).exists()
    report = worker.run_shard(shard)
    assert report.counts.failed == {}
    assert find_finished(plan) == [report]


def lose_power(*arguments: object) -> None:
    raise OutputError("the power is gone")


def test_a_retry_does_not_forget_how_the_others_were_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever answers a row again must know in which batch it was: the last bits depend on it."""
    plan = retry_job(tmp_path, "out", ["a", "b", "c", "<huge>"], rows_per_batch=4)
    worker, shard, first = begun(plan, Lessons(halvings=2))
    assert first.lessons.halvings == 2

    no_faults(monkeypatch)
    report = worker.retry_shard(shard)

    assert report.counts.halved == 1
    assert report.lessons.halvings == 2


def test_a_retry_in_smaller_batches_counts_that_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = retry_job(tmp_path, "out", ["a", "<huge>", "b"], rows_per_batch=1)
    worker, shard, first = begun(plan)

    no_faults(monkeypatch)
    report = worker.retry_shard(shard, Lessons(halvings=1))

    assert (first.counts.halved, report.counts.halved) == (0, 1)


def test_rows_beside_a_mended_one_are_repeated_in_the_batches_that_they_were_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 1 ended its worker and was left out of the batch; mended, it was in one of its own."""
    plan = retry_job(
        tmp_path, "out", ["aaaa", "bbb", "cc", "d"], rows_per_batch=2, schedule="fixed"
    )
    worker = open_worker(plan)
    [shard] = plan.shards
    batches: list[list[int]] = []
    monkeypatch.setattr(
        "workers.engines.faults.play_faults",
        lambda prompts, _: batches.append([prompt.row_id for prompt in prompts]),
    )
    error = RowError("generate", "worker_crash", "It died.", attempts=2, retryable=True)
    worker.run_shard(shard, Lessons(((1, error),)))
    worker.retry_shard(shard)
    assert batches == [[0, 2], [3], [1]]

    batches.clear()
    again, _ = worker.answer_again(shard, {0, 1, 2, 3})

    # How row 1 was answered is not known any more: it is left out.
    assert sorted(batches) == [[0, 2], [3]]
    assert sorted(again) == [0, 2, 3]


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_mended_part_passes_every_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_format: str
) -> None:
    plan = retry_job(
        tmp_path, "out", PROMPTS, rows_per_batch=1, output_format=file_format, logprobs=2,
        output_logits=True,
    )  # fmt: skip
    worker, shard, _ = begun(plan)

    no_faults(monkeypatch)
    report = worker.retry_shard(shard)

    assert check(plan, shard, report) == []
    assert report.mended == tuple(HUGE)


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_mended_part_is_as_easy_to_read_as_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_format: str
) -> None:
    """Not a row group or a record batch for each row."""
    prompts = ["<huge>", *(f"prompt {i}" for i in range(15))]
    plan = retry_job(tmp_path, "out", prompts, rows_per_batch=1, output_format=file_format)
    worker, shard, _ = begun(plan)

    no_faults(monkeypatch)
    worker.retry_shard(shard)

    path = str(part_path(plan, 0))
    if file_format == "arrow":
        with pa.memory_map(path) as file:
            assert pa.ipc.open_file(file).num_record_batches == 1
    else:
        assert pq.read_metadata(path).num_row_groups == 1


def test_a_worker_whose_run_has_lost_the_folder_writes_nothing(tmp_path: Path) -> None:
    """It was asleep, and another run has taken over meanwhile."""
    source = write_prompts(tmp_path / "in.parquet", ["a", "b"])
    plan = prepared(echo_job(source, tmp_path / "out"))
    late = Worker(plan, run_id="the run that was thought dead")
    late.open()

    with claim_output(plan.job.output) as claim:
        with pytest.raises(RefusedError, match="taken over by process"):
            late.run_shard(plan.shards[0])
        assert list_parts(plan.job.output) == []
        assert read_record(plan.job.output, plan.shards[0]) is None

        owner = Worker(plan, run_id=claim.run_id)
        owner.open()
        owner.run_shard(plan.shards[0])
    assert len(list_parts(plan.job.output)) == 1


def test_a_part_that_another_worker_has_written_over_is_noticed(tmp_path: Path) -> None:
    """One that was thought lost, and has finished the shard in its own way after all."""
    plan = finished(tmp_path)
    reports = find_finished(plan)
    _check_records(plan, reports)

    lessons = Lessons(((1, RowError("generate", "worker_crash", "It died.")),))
    open_worker(plan).run_shard(plan.shards[0], lessons)

    with pytest.raises(OutputError, match=r"part-00000\.parquet is not what its worker reported"):
        _check_records(plan, reports)
