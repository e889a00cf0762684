"""Input files: which are found, in which order, and reading any stretch of their rows."""

import os
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.errors import InputError
from jobs.files import RowSource, scan_input
from jobs.rows import RowReader


def write(path: Path, columns: Mapping[str, object], **settings: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **settings)
    return path


def names(source: RowSource) -> list[str]:
    return [os.path.basename(file.path) for file in source.files]


def refused(pattern: object) -> str:
    with pytest.raises(InputError) as caught:
        scan_input(str(pattern))
    return str(caught.value)


def read_all(source: RowSource, *, rows_per_read: int = 7) -> pa.Table:
    reader = RowReader(source, source.schema.names)
    starts = range(0, source.num_rows, rows_per_read)
    return pa.concat_tables(
        [reader.read(start, min(start + rows_per_read, source.num_rows)) for start in starts]
    )


def test_files_of_a_folder_are_taken_in_name_order(tmp_path: Path) -> None:
    for name, start in (("p2", 20), ("p10", 10), ("sub/p3", 40), ("p3", 30)):
        write(tmp_path / f"{name}.parquet", {"id": range(start, start + 3)})

    source = scan_input(str(tmp_path))

    assert names(source) == ["p10.parquet", "p2.parquet", "p3.parquet", "p3.parquet"]
    assert source.num_rows == 12
    assert read_all(source)["id"].to_pylist() == [
        10, 11, 12, 20, 21, 22, 30, 31, 32, 40, 41, 42,
    ]  # fmt: skip


def test_marker_files_and_strangers_are_passed_over(tmp_path: Path) -> None:
    """Case I05."""
    write(tmp_path / "p0.parquet", {"id": [1]})
    for name in ("_SUCCESS", "_metadata", ".p0.parquet.crc", "_x.parquet", "README.txt"):
        (tmp_path / name).write_bytes(b"")
    write(tmp_path / ".hidden" / "p1.parquet", {"id": [2]})

    assert names(scan_input(str(tmp_path))) == ["p0.parquet"]


def test_a_file_of_no_bytes_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    """Case I05."""
    write(tmp_path / "p0.parquet", {"id": [1]})
    (tmp_path / "z.parquet").write_bytes(b"")

    assert "z.parquet: cannot be read as a Parquet file" in refused(tmp_path)


def test_files_and_row_groups_without_rows_are_no_trouble(tmp_path: Path) -> None:
    """Case I06."""
    write(tmp_path / "a.parquet", {"id": [1, 2]})
    write(tmp_path / "b.parquet", {"id": pa.array([], pa.int64())})
    with pq.ParquetWriter(tmp_path / "c.parquet", pa.schema([("id", pa.int64())])):
        pass
    write(tmp_path / "d.parquet", {"id": [3]})

    assert read_all(scan_input(str(tmp_path)))["id"].to_pylist() == [1, 2, 3]
    assert scan_input(str(tmp_path / "c.parquet")).num_rows == 0


SPECIAL = ["a b.parquet", "50%20off.parquet", "[0].parquet", "x#y?.parquet", "größe-日本.parquet"]


def test_a_path_that_exists_is_meant_literally(tmp_path: Path) -> None:
    """Case I17."""
    for number, name in enumerate(SPECIAL):
        write(tmp_path / name, {"id": [number]})

    for number, name in enumerate(SPECIAL):
        assert read_all(scan_input(str(tmp_path / name)))["id"].to_pylist() == [number]
    assert set(names(scan_input(str(tmp_path)))) == set(SPECIAL)


def test_a_pattern_is_a_pattern_where_no_such_file_exists(tmp_path: Path) -> None:
    for name in ("0.parquet", "1.parquet", "2.parquet", "sub/3.parquet", "_4.parquet"):
        write(tmp_path / name, {"id": [1]})

    assert names(scan_input(f"{tmp_path}/[01].parquet")) == ["0.parquet", "1.parquet"]
    assert names(scan_input(f"{tmp_path}/**/*.parquet")) == [
        "0.parquet", "1.parquet", "2.parquet", "3.parquet",
    ]  # fmt: skip


def test_what_is_not_there_is_said_in_the_users_words(tmp_path: Path) -> None:
    assert refused(tmp_path / "no.parquet").endswith("no.parquet: no such file or folder.")
    assert refused(tmp_path / "*.parquet").endswith("*.parquet: no file matches this pattern.")
    assert "holds no file that ends in .parquet or .pq" in refused(tmp_path)
    (tmp_path / "spark.parquet").mkdir()
    assert "Only folders do: give the folder above" in refused(tmp_path / "*.parquet")
    (tmp_path / "spark.parquet").rmdir()
    (tmp_path / "text.parquet").write_text("no parquet")
    assert "text.parquet: cannot be read as a Parquet file" in refused(tmp_path / "text.parquet")
    assert "only local paths" in refused("s3://bucket/file.parquet")


def test_folders_that_carry_values_in_their_names_are_refused_not_dropped(tmp_path: Path) -> None:
    write(tmp_path / "city=Rome" / "p0.parquet", {"id": [1]})

    assert "city=Rome: folders that hold a column's value" in refused(tmp_path)


def test_an_all_null_column_takes_the_type_of_the_other_file(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet", {"note": pa.nulls(2), "id": [1, 2]})
    write(tmp_path / "1.parquet", {"id": [3, 4], "note": ["x", None]})

    table = read_all(scan_input(str(tmp_path)))

    assert table.schema.field("note").type == pa.string()
    assert table["note"].to_pylist() == [None, None, "x", None]
    assert table["id"].to_pylist() == [1, 2, 3, 4]


def test_a_column_that_a_file_lacks_is_null_there(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet", {"id": [1]})
    write(tmp_path / "1.parquet", {"id": [2], "extra": ["x"]})

    source = scan_input(str(tmp_path))

    assert read_all(source)["extra"].to_pylist() == [None, "x"]
    assert RowReader(source, ["extra"]).read(0, 2)["extra"].to_pylist() == [None, "x"]


def test_a_column_that_may_not_be_null_may_be_where_a_file_lacks_it(tmp_path: Path) -> None:
    table = pa.table({"id": [1]}).cast(pa.schema([pa.field("id", pa.int64(), nullable=False)]))
    pq.write_table(table, tmp_path / "0.parquet")
    write(tmp_path / "1.parquet", {"x": [2]})

    source = scan_input(str(tmp_path))

    assert source.schema.field("id").nullable
    assert source.lacking == {
        "id": str(tmp_path / "1.parquet"), "x": str(tmp_path / "0.parquet"),
    }  # fmt: skip
    assert read_all(source)["id"].to_pylist() == [1, None]


def test_dictionaries_of_all_files_become_one(tmp_path: Path) -> None:
    for number, words in enumerate((["x", "y"], ["z", "x"])):
        write(tmp_path / f"{number}.parquet", {"word": pa.array(words).dictionary_encode()})

    chunks = read_all(scan_input(str(tmp_path)), rows_per_read=4)["word"].chunks

    assert [value for chunk in chunks for value in chunk.to_pylist()] == ["x", "y", "z", "x"]
    assert len({str(chunk.dictionary) for chunk in chunks}) == 1


def test_linked_folders_are_entered_once(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "a.parquet", {"id": [1]})
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "in")

    assert names(scan_input(str(tmp_path / "in"))) == ["a.parquet"]


def test_a_folder_that_cannot_be_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the refusal is the system call's."""
    write(tmp_path / "a.parquet", {"id": [1]})
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)

    assert refused(tmp_path).endswith("closed: cannot be read: Permission denied.")


def test_a_folder_and_a_pattern_find_the_same_files_in_the_same_order(tmp_path: Path) -> None:
    for name in ("a-b/x", "a/x", "_tmp/y", "z"):
        write(tmp_path / f"{name}.parquet", {"id": [1]})

    folder = [file.path for file in scan_input(str(tmp_path)).files]
    pattern = [file.path for file in scan_input(f"{tmp_path}/**/*.parquet").files]

    assert folder == pattern
    assert [os.path.relpath(path, tmp_path) for path in folder] == [
        "a/x.parquet", "a-b/x.parquet", "z.parquet",
    ]  # fmt: skip


def test_files_that_disagree_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet", {"id": [1]})
    write(tmp_path / "1.parquet", {"id": ["one"]})

    assert refused(tmp_path) == (
        f"{tmp_path}/1.parquet: column 'id' is string, and int64 in {tmp_path}/0.parquet. "
        "Convert one of them."
    )


def test_any_stretch_can_be_read_forwards_and_backwards(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet", {"id": range(3000), "x": ["a"] * 3000}, row_group_size=1100)
    write(tmp_path / "1.parquet", {"id": range(3000, 3010), "x": ["b"] * 10})
    reader = RowReader(scan_input(str(tmp_path)), ["id"])

    for start, stop in ((0, 1), (5, 7), (1090, 1110), (2, 9), (2990, 3010), (0, 3010), (7, 7)):
        table = reader.read(start, stop)
        assert table["id"].to_pylist() == list(range(start, stop))
        assert table.column_names == ["id"]


def test_types_come_through_as_they_are(tmp_path: Path) -> None:
    """What a round trip through pandas would change."""
    import datetime
    import decimal

    columns = {
        "big": pa.array([9007199254740993, None, 5], pa.int64()),
        "unsigned": pa.array([2**64 - 1, 0, None], pa.uint64()),
        "decimal": pa.array([decimal.Decimal("1.5"), None, None], pa.decimal128(38, 9)),
        "when": pa.array([datetime.datetime(2024, 1, 1)] * 3, pa.timestamp("us", "Asia/Tokyo")),
        "old": pa.array([datetime.date(1500, 1, 1), None, None], pa.date32()),
        "bytes": pa.array([b"\x00\xff", b"", None]),
        "nested": pa.array([{"a": [1, None]}, None, {"a": None}]),
        "word": pa.array(["x", None, "x"]).dictionary_encode(),
        "nan": pa.array([float("nan"), None, 0.0]),
    }
    path = write(tmp_path / "0.parquet", columns)

    table = read_all(scan_input(str(path)))

    assert table.schema == pa.table(columns).schema
    for name, values in columns.items():
        # repr: NaN equals nothing, not even itself.
        assert repr(table[name].to_pylist()) == repr(values.to_pylist())


def test_a_file_that_changed_since_the_plan_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "0.parquet", {"id": [1, 2]})
    source = scan_input(str(path))
    write(path, {"id": [1, 2, 3]})

    with pytest.raises(InputError, match="the file has changed since the job was planned"):
        RowReader(source, ["id"]).read(0, 2)


def test_a_file_that_is_gone_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "0.parquet", {"id": [1, 2]})
    source = scan_input(str(path))
    path.unlink()

    with pytest.raises(InputError, match="cannot be read"):
        RowReader(source, ["id"]).read(0, 2)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(table, tmp_path / "0.parquet")

    assert "two columns have the same name" in refused(tmp_path / "0.parquet")
