"""The output folder: claimed, filled by drafts that become parts, and never half of anything."""

import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import echo_job, run_here, write_prompts

from jobs.drafts import PartWriter
from jobs.errors import OutputError, RefusedError, SettingError
from jobs.folder import check_parts, has_job, list_parts, read_json, sweep_drafts, write_json
from jobs.output import Start, check_output, clear_output
from jobs.parts import part_schema, read_part
from jobs.plan import Shard

SCHEMA = pa.schema([("x", pa.int64())])
TABLE = pa.table({"x": [1, 2, 3]})


def refused(folder: Path, *, start: Start = "new") -> str:
    with pytest.raises(RefusedError) as caught:
        check_output(str(folder), start)
    return str(caught.value)


def test_a_new_or_empty_folder_is_free(tmp_path: Path) -> None:
    check_output(str(tmp_path), "new")
    check_output(str(tmp_path / "a" / "b"), "new")

    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for name in ("d", "a", "c", "b"):
        (tmp_path / name).touch()

    assert refused(tmp_path) == (
        f"{tmp_path}: the folder is not empty; it has a, b, c and more. "
        "Choose a new folder, or pass --resume to complete it or --overwrite to delete it."
    )


def test_overwriting_deletes_what_a_job_wrote_and_nothing_else(tmp_path: Path) -> None:
    ours = [
        "part-00000.parquet", "part-123456.arrow", ".part-00001.77.draft", "_SUCCESS",
        "_job.json", "_plan.json", "_manifest.json", "._job.json.77.draft",
    ]  # fmt: skip
    for name in ours:
        (tmp_path / name).touch()
    stranger = tmp_path / "part-00000.csv"
    stranger.touch()

    assert "part-00000.csv is not from a job" in refused(tmp_path, start="overwrite")
    with pytest.raises(RefusedError):
        clear_output(str(tmp_path))
    assert len(list(tmp_path.iterdir())) == len(ours) + 1

    stranger.unlink()
    clear_output(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_files_that_are_called_like_ours_are_not_taken_for_a_jobs(tmp_path: Path) -> None:
    """Spark and others write part-00000.parquet and _SUCCESS too; only a job has _job.json."""
    for name in ("part-00000.parquet", "_SUCCESS"):
        (tmp_path / name).touch()

    assert "_SUCCESS is not from a job" in refused(tmp_path, start="overwrite")


def test_a_folder_whose_clearing_was_broken_off_is_begun_afresh(tmp_path: Path) -> None:
    """_plan.json goes before _job.json, and both after all else."""
    for name in ("part-00000.parquet", "_plan.json", "_job.json"):
        (tmp_path / name).touch()
    assert has_job(str(tmp_path))

    (tmp_path / "part-00000.parquet").unlink()
    (tmp_path / "_plan.json").unlink()

    assert not has_job(str(tmp_path))
    check_output(str(tmp_path), "resume")
    clear_output(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_nothing_is_deleted_before_a_stranger_is_found(tmp_path: Path) -> None:
    (tmp_path / "_records").mkdir()
    for name in ("_SUCCESS", "_job.json", "_plan.json", "_records/notes.txt"):
        (tmp_path / name).touch()

    assert "_records/notes.txt is not from a job" in refused(tmp_path, start="overwrite")
    with pytest.raises(RefusedError):
        clear_output(str(tmp_path))
    assert len(list(tmp_path.rglob("*"))) == 5


def test_drafts_are_swept_and_parts_are_counted(tmp_path: Path) -> None:
    for name in (".part-00001.77.draft", "part-00000.parquet", "notes.draft"):
        (tmp_path / name).touch()

    sweep_drafts(str(tmp_path))

    assert sorted(os.listdir(tmp_path)) == ["notes.draft", "part-00000.parquet"]
    check_parts(str(tmp_path), ["part-00000.parquet"])
    with pytest.raises(OutputError, match="was written by a worker and is not here"):
        check_parts(str(tmp_path), ["part-00000.parquet", "part-00001.parquet"])


def test_what_cannot_be_a_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(SettingError, match="file: is a file"):
        check_output(str(tmp_path / "file"), "new")
    with pytest.raises(SettingError, match=r"file is a file\. Choose another folder"):
        check_output(str(tmp_path / "file" / "out"), "new")
    with pytest.raises(SettingError, match="pyarrow has no file system for ftp://"):
        check_output("ftp://host/out", "new")


def test_a_folder_without_permission_is_said_before_anything_starts(tmp_path: Path) -> None:
    """Root may write anywhere, so the question is asked by a process of a lesser user."""
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR | stat.S_IROTH | stat.S_IXOTH)
    code = (
        "import os, sys\n"
        "from jobs.output import check_output\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "try: check_output(sys.argv[1], 'new')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    # A path that anyone may walk: pytest's own folders are closed to other users.
    folder = Path("/proc/self")
    result = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )

    assert result.stdout.startswith("OutputError /proc/self: no permission to write here")


def test_a_part_appears_when_it_is_whole(tmp_path: Path) -> None:
    writer = PartWriter(str(tmp_path), Shard(7, 0, 3), SCHEMA, "parquet")
    with writer:
        writer.append(TABLE)
        assert list_parts(str(tmp_path)) == []
        [draft] = os.listdir(tmp_path)
        assert draft.startswith(f".part-00007.{os.getpid()}_")
        assert draft.endswith(".draft")
        part = writer.finish()
        assert list_parts(str(tmp_path)) == []
        writer.commit()

    assert os.listdir(tmp_path) == ["part-00007.parquet"]
    path = tmp_path / "part-00007.parquet"
    assert read_part(str(path)).equals(TABLE)
    assert (part.name, part.num_rows) == ("part-00007.parquet", 3)
    assert part.size_bytes == path.stat().st_size
    assert part.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_part_that_is_broken_off_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        PartWriter(str(tmp_path), Shard(0, 0, 3), SCHEMA, "arrow") as writer,
    ):
        writer.append(TABLE)
        raise ZeroDivisionError

    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
def test_the_same_rows_are_the_same_bytes(tmp_path: Path, file_format: str) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        with PartWriter(str(tmp_path / folder), Shard(0, 0, 3), SCHEMA, file_format) as writer:
            writer.append(TABLE)
            writer.finish()
            writer.commit()

    name = f"part-00000.{file_format}"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert part_schema(str(tmp_path / "a" / name)) == SCHEMA


def test_a_folder_that_vanishes_is_said(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        PartWriter(str(tmp_path / "gone"), Shard(0, 0, 3), SCHEMA, "parquet")


def test_a_full_disk_is_said() -> None:
    with pytest.raises(OutputError, match="No space left"):
        writer = PartWriter("/dev", Shard(0, 0, 3), SCHEMA, "parquet")
        try:
            writer._file._file.close()
            writer._file._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
            writer.append(TABLE)
            writer.finish()
            writer.commit()
        finally:
            writer.__exit__(None, None, None)


def test_parts_are_listed_in_row_order_whatever_their_number(tmp_path: Path) -> None:
    for index in (100000, 99999, 2, 10):
        (tmp_path / f"part-{index:05d}.parquet").touch()
    (tmp_path / ".part-00003.1.draft").touch()

    assert [os.path.basename(path) for path in list_parts(str(tmp_path))] == [
        "part-00002.parquet", "part-00010.parquet", "part-99999.parquet", "part-100000.parquet",
    ]  # fmt: skip


def test_json_files_are_whole_or_not_there(tmp_path: Path) -> None:
    write_json(str(tmp_path), "_job.json", {"a": [1, None]})

    assert read_json(str(tmp_path), "_job.json") == {"a": [1, None]}
    assert os.listdir(tmp_path) == ["_job.json"]
    with pytest.raises(OutputError, match="not the output of a job"):
        read_json(str(tmp_path), "_plan.json")


def test_paths_are_taken_as_they_are_written(tmp_path: Path) -> None:
    """Case O15: no twin folder with %20 or %2520 in its name."""
    output = tmp_path / "some dir" / "50%20 x"
    source = write_prompts(tmp_path / "in.parquet", ["a"])

    run_here(echo_job(source, output))

    assert (output / "part-00000.parquet").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "some dir"]
    assert [path.name for path in (tmp_path / "some dir").iterdir()] == ["50%20 x"]


def test_logits_are_plain_and_the_rest_is_compressed(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a" * 50] * 8)
    run_here(echo_job(source, tmp_path / "out", output_logits=True, logprobs=3))

    metadata = pq.ParquetFile(tmp_path / "out" / "part-00000.parquet").metadata
    chunks = [metadata.row_group(0).column(i) for i in range(metadata.num_columns)]
    plain = [chunk.path_in_schema for chunk in chunks if chunk.compression == "UNCOMPRESSED"]
    assert plain == ["logits.list.element.list.element"]
    assert [c.path_in_schema for c in chunks if c.statistics is None] == plain
    assert {c.compression for c in chunks if c.path_in_schema not in plain} == {"ZSTD"}


def test_row_groups_of_logits_are_bounded_by_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case O04, at a thousandth of the size."""
    from jobs import drafts

    monkeypatch.setattr(drafts, "_ROW_GROUP_BYTES", 10_000)
    source = write_prompts(tmp_path / "in.parquet", [str(i) for i in range(20)])

    table, _ = run_here(
        echo_job(source, tmp_path / "out", output_logits=True, max_new_tokens=4,
                 rows_per_batch=20, rows_per_shard=20)
    )  # fmt: skip

    file = pq.ParquetFile(tmp_path / "out" / "part-00000.parquet")
    # A row takes 4 x 257 x 4 bytes: two of them fit.
    assert [file.metadata.row_group(i).num_rows for i in range(10)] == [2] * 10
    assert table["row_id"].to_pylist() == list(range(20))
    assert np.array(table["logits"][0].as_py()).shape == (4, 257)
