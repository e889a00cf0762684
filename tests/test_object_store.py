"""Output folders in a bucket: what is true of a folder on a disk is true of them too."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pyarrow as pa
import pytest
from bucket_server import BucketServer, Request, serve_buckets
from running import (
    BATCHWRIGHT,
    batchwright,
    echo_job,
    make_job,
    open_worker,
    run_here,
    write_prompts,
)

from jobs import claim as claims
from jobs import store as stores
from jobs.claim import OWNER, Claim, claim_output, read_owner
from jobs.drafts import PartWriter
from jobs.errors import OutputError, RefusedError, SettingError
from jobs.folder import list_parts, read_json, sweep_drafts, write_json
from jobs.model import ModelRef
from jobs.output import Start, check_output, clear_output
from jobs.owner import Owner
from jobs.parts import part_num_rows, read_part
from jobs.plan import Plan, Shard
from jobs.records import find_finished
from jobs.storage import join, name_of, storage_of
from runner.manifest import describe_job, write_intent
from runner.plan import make_plan
from runner.show import show_output

FORMATS = ["parquet", "arrow"]
FARAWAY = Owner("0123456789abcdef", "faraway", 7, "12345", "another machine")
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "hidden"}


@pytest.fixture(scope="module")
def server() -> Iterator[BucketServer]:
    """A server, and an environment that lets whoever is asked find it."""
    with serve_buckets() as running, pytest.MonkeyPatch.context() as patch:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{running.address}")
        yield running


@pytest.fixture
def bucket(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket of its own; at the end the server does again as it should."""
    monkeypatch.setattr(stores, "SECONDS_TO_SETTLE", 0.5)
    name = server.make_bucket()
    server.requests.clear()
    yield name
    server.refuse, server.delay_seconds = (lambda request: False), (lambda request: 0.0)


def begin(folder: str, source: Path, **settings: object) -> Plan:
    """A job's plan, its intent written."""
    job = dataclasses.replace(echo_job(source, Path("x"), **settings), output=folder)
    plan = make_plan(job)
    assert plan.job.output == folder
    write_intent(folder, describe_job(plan))
    return plan


def run_plan(plan: Plan) -> None:
    worker = open_worker(plan)
    for shard in plan.shards:
        worker.run_shard(shard)


def parts_of(server: BucketServer, bucket: str) -> dict[str, bytes]:
    """Parts by their names."""
    keys = [key for key in server.keys(bucket) if name_of(key).startswith("part-")]
    return {name_of(k): server.read(bucket, k) for k in keys if not k.endswith(".json")}


def parts_on_disk(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("part-*")}


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("says_where", [True, False], ids=["in the URI", "in the environment"])
def test_parts_are_the_same_bytes_as_on_a_disk_and_written_once(
    server: BucketServer, bucket: str, tmp_path: Path, file_format: str, says_where: bool
) -> None:
    source = write_prompts(tmp_path / "in.parquet", [f"{i}" for i in range(10)])
    settings = {"rows_per_shard": 4, "logprobs": 2, "output_format": file_format}
    run_here(echo_job(source, tmp_path / "out", **settings))

    folder = f"s3://{bucket}/deep/out{server.options if says_where else ''}"
    plan = begin(folder, source, **settings)
    run_plan(plan)

    assert parts_of(server, bucket) == parts_on_disk(tmp_path / "out")
    parts = [f"part-{number:05d}" for number in range(3)]
    assert server.puts(bucket) == {
        key: 1
        for key in (
            *(f"deep/out/{name}" for name in ("_plan.json", "_job.json")),
            *(f"deep/out/{part}.{file_format}" for part in parts),
            *(f"deep/out/_records/{part}.json" for part in parts),
        )
    }
    assert [record.shard for record in find_finished(plan)] == plan.shards
    assert sum(part_num_rows(path) for path in list_parts(folder)) == 10


def test_a_part_larger_than_one_request_comes_whole_in_one_moment(
    server: BucketServer, bucket: str
) -> None:
    content = os.urandom(25_000_000)
    draft = storage_of(f"s3://{bucket}/out").draft("part-00000.parquet")

    draft.file.write(content)
    assert draft.seal() == len(content)
    assert server.keys(bucket) == []
    server.delay_seconds = lambda request: 0.5 * (request.method == "POST")
    with ThreadPoolExecutor(1) as thread:
        uploading = thread.submit(draft.publish)
        while not uploading.done():
            assert server.keys(bucket) in ([], ["out/part-00000.parquet"])
    uploading.result()

    assert server.read(bucket, "out/part-00000.parquet") == content
    assert sum(r.is_upload for r in server.requests) > 1


INTERRUPT = """
import signal, sys
from jobs.storage import storage_of
def interrupt(number, frame):
    raise InterruptedError
signal.signal(signal.SIGALRM, interrupt)
draft = storage_of(sys.argv[1]).draft("part-00000.parquet")
draft.file.write(bytes(25_000_000))
draft.seal()
signal.setitimer(signal.ITIMER_REAL, 0.2)
draft.publish()
"""
"An upload that a signal's handler raises an error in."


def test_what_interrupts_an_upload_leaves_a_whole_part_or_none(
    server: BucketServer, bucket: str
) -> None:
    """A stream that is dropped half-way would be published as far as it has come.

    In a process of its own, since what drops a stream lets nobody else in this one go on.
    """
    server.delay_seconds = lambda request: 0.5 * request.is_upload

    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPT, f"s3://{bucket}/out"],
        capture_output=True, text=True, timeout=40, check=False,
    )  # fmt: skip

    assert "InterruptedError" in ended.stderr
    assert [len(part) for part in parts_of(server, bucket).values()] in ([], [25_000_000])


def test_a_part_that_is_broken_off_leaves_nothing(server: BucketServer, bucket: str) -> None:
    table = pa.table({"x": [1, 2, 3]})

    with (
        pytest.raises(ZeroDivisionError),
        PartWriter(f"s3://{bucket}/out", Shard(0, 0, 6), table.schema, "parquet") as writer,
    ):
        writer.append(table)
        raise ZeroDivisionError

    assert server.requests == []


@pytest.mark.parametrize("step", ["begin", "bring", "end"])
def test_an_upload_that_fails_is_said_and_leaves_no_part(
    server: BucketServer, bucket: str, tmp_path: Path, step: str
) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a", "b"])
    plan = begin(f"s3://{bucket}/out", source)
    worker = open_worker(plan)
    option = {"begin": "uploads", "bring": "partNumber", "end": "uploadId"}[step]
    method = "PUT" if step == "bring" else "POST"
    server.refuse = lambda r: "part-" in r.key and r.method == method and option in r.options

    with pytest.raises(OutputError) as caught:
        worker.run_shard(plan.shards[0])

    said = str(caught.value)
    assert said.startswith(f"s3://{bucket}/out: cannot be written: ")
    assert "ACCESS_DENIED" in said
    assert "Give credentials that may list, read, write and delete there" in said
    server.refuse = lambda request: False
    assert server.keys(bucket) == ["out/_job.json", "out/_plan.json"]
    assert find_finished(plan) == []
    worker.run_shard(plan.shards[0])
    assert len(find_finished(plan)) == 1


def test_a_piece_of_an_upload_that_fails_while_others_go_on_ends_it(
    server: BucketServer, bucket: str
) -> None:
    draft = storage_of(f"s3://{bucket}/out").draft("part-00000.parquet")
    draft.file.write(bytes(45_000_000))
    draft.seal()
    pieces = itertools.count()
    server.delay_seconds = lambda request: 0.3 * request.is_upload
    server.refuse = lambda request: request.is_upload and next(pieces) == 0

    with pytest.raises(OSError, match="ACCESS_DENIED"):
        draft.publish()

    draft.discard()
    assert server.keys(bucket) == []


def test_a_local_disk_that_is_full_is_named(
    bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a", "b"])
    plan = begin(f"s3://{bucket}/out", source)
    monkeypatch.setattr("tempfile.TemporaryFile", full_disk)
    monkeypatch.setattr("tempfile.tempdir", "/scratch")

    with pytest.raises(OutputError) as caught:
        open_worker(plan).run_shard(plan.shards[0])

    assert str(caught.value) == (
        f"s3://{bucket}/out, staged in /scratch: cannot be written: [Errno 28] No space left on "
        "device. Free some space, then run again with --resume: what is finished is kept."
    )


def full_disk(**_: object) -> IO[bytes]:
    return os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")


def test_only_what_is_asked_for_is_read(
    server: BucketServer, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part of 5 MB of logits: neither its rows are counted nor is it shown by reading those."""
    source = write_prompts(tmp_path / "in.parquet", [f"{i}" for i in range(10)])
    for file_format in FORMATS:
        folder = f"s3://{bucket}/{file_format}"
        plan = begin(
            folder, source, output_logits=True, max_new_tokens=500, ignore_eos=True,
            output_format=file_format, rows_per_shard=16,
        )  # fmt: skip
        run_plan(plan)
        [path] = list_parts(folder)
        size = storage_of(folder).size(name_of(path))
        assert size > 5_000_000

        server.bytes_sent = 0
        assert len(find_finished(plan)) == 1
        show_output(folder, 5)

        assert server.bytes_sent < size / 10
    assert "10 rows in 1 part" in capsys.readouterr().out


def test_rows_whose_error_may_pass_are_answered_again(
    server: BucketServer, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a", "<huge>", "b"])
    faulty = ModelRef("faulty", engine="echo")
    job = make_job(source, tmp_path / "out", faulty, rows_per_batch=1, rows_per_shard=16)
    outputs = [str(tmp_path / "out"), f"s3://{bucket}/out"]
    plans = [make_plan(dataclasses.replace(job, output=output)) for output in outputs]
    os.mkdir(tmp_path / "out")
    reports = []
    for plan in plans:
        write_intent(plan.job.output, describe_job(plan))
        worker = open_worker(plan)
        first = worker.run_shard(plan.shards[0])
        assert (first.retryable, first.counts.failed_rows) == (1, 1)

        with monkeypatch.context() as patch:
            patch.setattr("workers.engines.faults.play_faults", lambda *_: None)
            reports.append(worker.retry_shard(plan.shards[0]))

    assert [report.counts.failed_rows for report in reports] == [0, 0]
    assert parts_of(server, bucket) == parts_on_disk(tmp_path / "out")
    assert find_finished(plans[1]) == [reports[1]]


def test_overwriting_deletes_what_a_job_wrote_and_nothing_else(
    server: BucketServer, bucket: str
) -> None:
    ours = ["_SUCCESS", "_job.json", "_manifest.json", "_plan.json", "part-00000.parquet"]
    for name in (*ours, "_records/part-00000.json", "_records/notes.txt", "._now.json.7.draft"):
        server.write(bucket, f"out/{name}")
    server.write(bucket, "outside/part-00000.parquet")
    folder = f"s3://{bucket}/out"

    assert refused(folder, "overwrite").endswith(
        "_records/notes.txt is not from a job. Choose a new folder."
    )
    assert refused(folder, "new").startswith(
        f"{folder}: the folder is not empty; it has _SUCCESS, _job.json, _manifest.json and more. "
    )
    with pytest.raises(RefusedError):
        clear_output(folder)
    assert len(server.keys(bucket)) == 9
    storage_of(folder).delete("_records/notes.txt")
    clear_output(folder)

    assert server.keys(bucket) == ["outside/part-00000.parquet"]
    check_output(folder, "new")
    assert storage_of(folder).names() == []


def refused(folder: str, start: Start) -> str:
    with pytest.raises(RefusedError) as caught:
        check_output(folder, start)
    return str(caught.value)


def test_json_is_read_back_and_what_is_not_there_is_said(bucket: str) -> None:
    folder = f"s3://{bucket}/out"
    check_output(folder, "new")
    with pytest.raises(OutputError, match=rf"{folder}: cannot be read: .* does not exist"):
        list_parts(folder)
    with pytest.raises(OutputError, match=f"{folder}: not the output of a job: "):
        read_json(folder, "_job.json")
    with pytest.raises(OutputError, match=f"{folder}/part-00000.parquet: cannot be read: "):
        read_part(f"{folder}/part-00000.parquet")

    write_json(folder, "_job.json", {"a": "ä"})

    assert read_json(folder, "_job.json") == {"a": "ä"}


def test_a_claim_is_one_key_that_is_kept_fresh_and_given_back(
    server: BucketServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "SECONDS_BETWEEN_BEATS", 0.05)
    folder = f"s3://{bucket}/out"

    with claim_output(folder) as claim:
        assert server.keys(bucket) == [f"out/{OWNER}"]
        claim.check()
        with pytest.raises(RefusedError, match=f"{folder}: in use by process {os.getpid()} on "):
            check_output(folder, "new")
        with pytest.raises(RefusedError, match="in use by"), claim_output(folder):
            pass
        wait_for_puts(server, bucket, 4)

    assert claim.dead_owner is None
    assert server.keys(bucket) == []


def wait_for_puts(server: BucketServer, bucket: str, number: int) -> None:
    deadline = time.monotonic() + 20
    while server.puts(bucket)[f"out/{OWNER}"] < number:
        assert time.monotonic() < deadline, "the heart does not beat"
        time.sleep(0.05)


def write_owner(server: BucketServer, bucket: str, owner: Owner) -> None:
    server.write(bucket, f"out/{OWNER}", json.dumps(dataclasses.asdict(owner)).encode())


def test_an_owner_elsewhere_is_dead_when_its_heart_has_not_beaten_by_the_stores_clock(
    server: BucketServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"s3://{bucket}/out"
    write_owner(server, bucket, FARAWAY)
    with pytest.raises(RefusedError) as caught, claim_output(folder):
        pass
    assert str(caught.value) == (
        f"{folder}: in use by process 7 on faraway. Wait for it, or choose another folder. Should "
        "that run be dead, try again in 60 s."
    )
    assert server.keys(bucket) == [f"out/{OWNER}"]

    monkeypatch.setattr(claims, "SECONDS_UNTIL_DEAD", 1.5)
    time.sleep(3)  # The store's times are whole seconds.

    check_output(folder, "new")
    with claim_output(folder) as claim:
        assert claim.dead_owner == "process 7 on faraway"
        assert server.keys(bucket) == [f"out/{OWNER}"]
        claim.check()
    assert server.keys(bucket) == []


def test_a_run_that_was_taken_over_writes_no_more_and_leaves_the_others_claim(
    server: BucketServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "SECONDS_BETWEEN_BEATS", 0.05)
    folder = f"s3://{bucket}/out"

    with claim_output(folder) as claim:
        write_owner(server, bucket, FARAWAY)
        time.sleep(0.5)
        with pytest.raises(RefusedError, match="taken over by process 7 on faraway"):
            claim.check()

    assert read_owner(folder) == FARAWAY


def test_of_runs_that_claim_in_the_same_moment_one_gets_it(
    server: BucketServer, bucket: str
) -> None:
    """All look, and find nobody, before any of them writes; all have written before any reads."""
    num_runs = 4
    writing, reading = threading.Barrier(num_runs), threading.Barrier(num_runs)
    readers = iter(range(num_runs))

    def wait_for_the_others(request: Request) -> float:
        if request.key.endswith(OWNER) and "uploads" in request.options:
            writing.wait(20)
        if (
            request.key.endswith(OWNER)
            and request.method == "GET"
            and next(readers, None) is not None
        ):
            reading.wait(20)
        return 0.0

    server.delay_seconds = wait_for_the_others

    def come() -> Claim | None:
        try:
            return held.enter_context(claim_output(f"s3://{bucket}/out"))
        except RefusedError as error:
            assert "in use by process" in str(error)
            return None

    with ExitStack() as held, ThreadPoolExecutor(num_runs) as pool:
        claims_won = [c for c in pool.map(lambda _: come(), range(num_runs)) if c is not None]
        assert len(claims_won) == 1
        claims_won[0].check()


def test_sweeping_leaves_what_is_no_draft(server: BucketServer, bucket: str) -> None:
    for name in ("._now.json.ab.draft", "notes.draft", "_records/part-00000.json"):
        server.write(bucket, f"out/{name}")

    sweep_drafts(f"s3://{bucket}/out")

    assert server.keys(bucket) == ["out/_records/part-00000.json", "out/notes.draft"]


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("s3://no-such-bucket/out", "there is no bucket 'no-such-bucket'. Make it, or name anoth"),
        ("s3://", "names no bucket. Name one."),
        ("az://x/out", "pyarrow has no file system for az://. Give a path, or a URI of file, s3"),
        ("s3://b/out?no_such=1", "Unexpected query parameter in S3 URI: 'no_such'"),
        ("s3://b/two words", "Cannot parse URI"),
        ("file://host/out", "Unsupported hostname"),
    ],
)
def test_a_place_that_cannot_be_used_is_said(server: BucketServer, uri: str, said: str) -> None:
    with pytest.raises(SettingError) as caught:
        check_output(uri, "new")

    assert str(caught.value).startswith(f"{uri}: ")
    assert said in str(caught.value)


def test_a_key_in_the_place_of_the_folder_is_said(server: BucketServer, bucket: str) -> None:
    server.write(bucket, "out", b"x")

    with pytest.raises(SettingError, match=r"out: is a file\. Choose a folder\."):
        check_output(f"s3://{bucket}/out", "new")


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_a_bucket_that_is_closed_is_said(server: BucketServer, bucket: str, method: str) -> None:
    server.refuse = lambda request: request.method == method

    with pytest.raises(OutputError) as caught:
        check_output(f"s3://{bucket}/out", "resume")

    assert not isinstance(caught.value, RefusedError)
    assert "ACCESS_DENIED" in str(caught.value)


def test_a_bucket_that_may_not_be_written_is_said_by_the_claim(
    server: BucketServer, bucket: str
) -> None:
    server.refuse = lambda request: request.method != "GET" and bool(request.key)

    with (
        pytest.raises(OutputError, match=r"cannot be made ready: .*ACCESS_DENIED"),
        claim_output(f"s3://{bucket}/out"),
    ):
        pass


def test_a_store_that_cannot_be_reached_is_said(server: BucketServer) -> None:
    with pytest.raises(OutputError) as caught:
        check_output("s3://b/out?endpoint_override=127.0.0.1:1&scheme=http", "new")

    assert "cannot be reached: " in str(caught.value)
    assert str(caught.value).endswith("See to it that the store can be reached from here.")


@pytest.mark.parametrize(
    "uri",
    [
        "s3://AKIA:hidden@b/out",
        "s3://AKIA:hid/den@b/out",
        "s3://AKIA@b/out",
        "s3://AKIA%3Ahidden%40b/out",
        "s3://b/out?endpoint_override=me:hidden@host",
        "abfs://box:hidden@account.dfs.core.windows.net/out",
        "abfs://box@account.dfs.core.windows.net/out?client_secret=hidden",
        "gs://b/out?access_token=hidden",
    ],
)
def test_a_secret_in_a_uri_is_refused_and_not_repeated(uri: str) -> None:
    def check(folder: str) -> None:
        check_output(folder, "new")

    def claim(folder: str) -> None:
        claim_output(folder).__enter__()

    def read(folder: str) -> None:
        read_json(folder, "_job.json")

    for look in (storage_of, check, claim, read, list_parts, read_part, part_num_rows, read_owner):
        with pytest.raises(SettingError) as caught:
            look(uri)

        said = str(caught.value)
        assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in said
        assert not any(word in said for word in ("AKIA", "hid", "den@"))


@pytest.mark.parametrize("uri", ["s3://b/a@b", "s3://b/a:b", "abfs://box@acc.dfs.x/a", "gs://b/a"])
def test_a_uri_without_a_secret_is_none(server: BucketServer, uri: str) -> None:
    assert storage_of(uri + (server.options if uri.startswith("s3") else ""))


def test_a_file_uri_is_a_path(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a"])
    folder = (tmp_path / "my out").as_uri()

    check_output(folder, "new")
    job = dataclasses.replace(echo_job(source, tmp_path), output=folder)
    run_here(job)

    assert make_plan(job).job.output == str(tmp_path / "my out")

    assert sorted(os.listdir(tmp_path / "my out")) == [
        "_job.json", "_plan.json", "_records", "part-00000.parquet",
    ]  # fmt: skip


RUN = (
    "--model", "e", "--engine", "echo", "--max-new-tokens", "400", "--temperature", "0",
    "--ignore-eos", "--rows-per-shard", "10", "--num-workers", "2",
)  # fmt: skip


@pytest.mark.slow
def test_a_killed_run_goes_on_and_every_command_knows_the_bucket(
    server: BucketServer, bucket: str, tmp_path: Path
) -> None:
    """The whole way, with processes that share nothing but the bucket. Starts Ray three times."""
    source = write_prompts(tmp_path / "in.parquet", [f"{i}" for i in range(200)])
    folder = f"s3://{bucket}/out"
    settings = {"max_new_tokens": 400, "ignore_eos": True, "rows_per_shard": 10}
    job = echo_job(source, tmp_path / "out", rows_per_batch=64, **settings)
    run_here(dataclasses.replace(job, model=ModelRef("e", engine="echo")))
    driver = subprocess.Popen(
        [BATCHWRIGHT, "run", source, folder, *RUN], stderr=subprocess.PIPE, text=True
    )
    while not parts_of(server, bucket):
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.05)

    for flag in ("--resume", "--overwrite"):
        second = batchwright("run", source, folder, *RUN, flag)
        assert second.returncode == 4, second.stderr
        assert f"{folder}: in use by process {driver.pid} on " in second.stderr
    driver.kill()
    driver.communicate()
    assert f"out/{OWNER}" in server.keys(bucket)
    early = batchwright("verify", folder)
    assert (early.returncode, "Go on with --resume" in early.stdout) == (1, True), early.stderr
    again = batchwright("run", source, folder, *RUN, "--resume")

    assert again.returncode == 0, again.stderr
    assert f"Taken over from process {driver.pid} on " in again.stderr
    assert parts_of(server, bucket) == parts_on_disk(tmp_path / "out")
    shards = [f"part-{number:05d}" for number in range(20)]
    ours = ("_SUCCESS", "_job.json", "_manifest.json", "_plan.json")
    records = [f"out/_records/{name}.json" for name in shards]
    parts = [f"out/{name}.parquet" for name in shards]
    assert server.keys(bucket) == sorted([*(f"out/{name}" for name in ours), *records, *parts])
    markers = {"out/", f"out/{OWNER}"}
    assert set(server.puts(bucket)) - markers == set(server.keys(bucket)), "a key for a while"
    # A part whose record was lost with its worker is done again; no other is.
    assert sum(server.puts(bucket)[part] for part in parts) <= len(parts) + 2
    assert server.puts(bucket)["out/_SUCCESS"] == 1
    check_commands(folder, tmp_path / "out")

    write_prompts(source, ["a"])
    other = batchwright("run", source, folder, *RUN, "--resume")
    assert other.returncode == 4, other.stderr
    afresh = batchwright("run", source, folder, *RUN, "--overwrite", "--json")
    assert afresh.returncode == 0, afresh.stderr
    assert json.loads(afresh.stdout)["rows"] == 1
    assert [*parts_of(server, bucket)] == ["part-00000.parquet"]
    nothing = batchwright("run", source, folder, *RUN, "--retry-failed")
    assert nothing.returncode == 0, nothing.stderr
    assert batchwright("diff", folder, tmp_path / "out").returncode == 1
    server.write(bucket, "out/part-00000.parquet", b"damaged")
    assert batchwright("verify", folder).returncode == 1


def check_commands(folder: str, same: Path) -> None:
    """The commands that look, at an output that is whole. same: rows and parts on a disk."""
    sound = batchwright("verify", folder, "--rerun-sample", 3)
    assert sound.returncode == 0, sound.stdout + sound.stderr
    assert "3 rows answered again: 3 the same to the last bit" in sound.stdout
    alike = batchwright("diff", folder, same)
    assert (alike.returncode, "every part the same bytes" in alike.stdout) == (0, True)
    shown = batchwright("show", folder, "--row", 150)
    assert shown.returncode == 0, shown.stderr
    assert "row_id" in shown.stdout


@pytest.mark.slow
def test_what_is_wrong_with_a_bucket_is_said_before_ray_starts(
    server: BucketServer, tmp_path: Path
) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a"])

    for folder, code, said in (
        ("s3://no-such-bucket/out", 2, "there is no bucket 'no-such-bucket'"),
        ("s3://me:hidden@b/out", 2, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("s3://b/out?endpoint_override=127.0.0.1:1&scheme=http", 1, "cannot be reached: "),
    ):
        result = batchwright("run", source, folder, *RUN)
        assert (result.returncode, result.stdout) == (code, "")
        assert said in result.stderr
        assert "Traceback" not in result.stderr
        assert "hidden" not in result.stderr
    assert batchwright("verify", "s3://no-such-bucket/out").returncode == 1
    assert batchwright("show", "s3://me:hidden@b/out").returncode == 2


def test_names_stand_before_what_a_uri_asks_for() -> None:
    path = join("s3://b/out?scheme=http", "_records", "x.json")

    assert path == "s3://b/out/_records/x.json?scheme=http"
    assert name_of(path) == "x.json"
    assert join("out?", "x") == "out?/x"
    assert name_of("out/what?") == "what?"
