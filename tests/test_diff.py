"""Two outputs side by side: what is the same is said to be, and every difference has its place."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from running import batchwright as run_command
from running import echo_job, prepared, read_rows, run_plan, write_prompts

from jobs.compare import Comparison, RowDifference
from jobs.errors import OutputError
from runner.cli import batchwright, exit_code
from runner.diff import diff_outputs

PROMPTS = ["abc", "def", "ghij", "k", "lm", "nop", "q"]
FIRST = "part-00000.parquet"


def run(folder: Path, name: str, source: Path | None = None, **settings: object) -> Path:
    """Runs a job on 7 prompts, or those of a file, and returns its output folder."""
    if source is None:
        source = write_prompts(folder / "in.parquet", PROMPTS)
    settings = {"ignore_eos": True, "rows_per_shard": 100, **settings}
    run_plan(prepared(echo_job(source, folder / name, **settings)))
    return folder / name


def compare(a: Path, b: Path) -> Comparison:
    return diff_outputs(str(a), str(b))[0]


def diff(*arguments: object) -> Result:
    """The command in this process; what it returns is its exit code."""
    result = CliRunner().invoke(batchwright, ["diff", *map(str, arguments)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result


def put(
    folder: Path, column: str, row: int, change: Callable[[object], object], *, part: str = FIRST
) -> None:
    """One cell of a part is another."""
    table = pq.read_table(folder / part)
    values = table[column].to_pylist()
    values[row] = change(values[row])
    place, field = table.schema.get_field_index(column), table.schema.field(column)
    pq.write_table(table.set_column(place, field, pa.array(values, field.type)), folder / part)


def nudge(place: int, by: float) -> Callable[[list[float]], list[float]]:
    return lambda values: [v + by if i == place else v for i, v in enumerate(values)]


def first_difference(a: list[int], b: list[int]) -> tuple[int, int | None, int | None] | None:
    """Place and both ids, by walking; None if there is no difference."""
    place = 0
    while True:
        left = a[place] if place < len(a) else None
        right = b[place] if place < len(b) else None
        if left != right:
            return place, left, right
        if left is None:
            return None
        place += 1


def test_the_same_job_twice_is_the_same_bytes(tmp_path: Path) -> None:
    a = run(tmp_path, "a", logprobs=2, output_logits=True, rows_per_shard=3)
    b = run(tmp_path, "b", logprobs=2, output_logits=True, rows_per_shard=3)

    result = diff(a, b)

    assert result.return_value == 0
    assert result.output == "the same: 7 rows, every part the same bytes\n"
    assert compare(a, b) == Comparison(7, 7, rows_compared=7)


@pytest.mark.parametrize(
    "settings",
    [
        {"rows_per_shard": 2},
        {"output_format": "arrow"},
        {"output_format": "arrow", "rows_per_shard": 3},
        {"output_prefix": "b_"},
    ],
    ids=str,
)
def test_the_same_rows_in_other_files_are_the_same(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    common = {"logprobs": 2, "output_logits": True}
    a = run(tmp_path, "a", **common)
    b = run(tmp_path, "b", **common, **settings)

    result = diff(a, b)

    assert result.return_value == 0
    assert result.output == (
        "7 rows compared: 0 differ, 0 of them in their tokens\n"
        "the same rows, in files that are not the same bytes\n"
    )
    assert diff_outputs(str(a), str(b)) == (Comparison(7, 7, rows_compared=7), False)


def test_the_first_differing_token_of_every_row_is_found(tmp_path: Path) -> None:
    """Few likely tokens, so that rows part at many places, and some not at all."""
    source = write_prompts(tmp_path / "in.parquet", [f"{i}" for i in range(60)])
    settings = {"temperature": 1.0, "top_k": 2, "top_p": 0.9, "max_new_tokens": 5, "logprobs": 0}
    a = run(tmp_path, "a", source, seed=1, **settings)
    b = run(tmp_path, "b", source, seed=2, rows_per_shard=7, **settings)

    comparison = compare(a, b)

    pairs = zip(*(read_rows(folder)["token_ids"].to_pylist() for folder in (a, b)), strict=True)
    places = [first_difference(left, right) for left, right in pairs]
    assert comparison.tokens_differing == [
        RowDifference(row, *place) for row, place in enumerate(places) if place is not None
    ]
    assert len({place[0] for place in places if place is not None}) > 2
    assert 0 < len(comparison.tokens_differing) < 60
    # The seed column differs in every row.
    assert (comparison.rows_differing, comparison.rows_compared) == (60, 60)
    assert comparison.columns_differing["seed"] == 60
    assert comparison.columns_differing["token_ids"] == len(comparison.tokens_differing)
    # Before the first token that differs, the echo engine's logits are the same.
    assert (comparison.logprob_difference, comparison.logprob_row) == (0.0, None)
    assert not comparison.is_same


def test_rows_are_numbered_through_stretches_and_parts(tmp_path: Path) -> None:
    """1,100 rows are two stretches, and 16 parts of one output are three of the other."""
    source = write_prompts(tmp_path / "in.parquet", [f"{i}" for i in range(1100)])
    settings = {"max_new_tokens": 1, "rows_per_batch": 64, "logprobs": 0}
    a = run(tmp_path, "a", source, rows_per_shard=500, **settings)
    b = run(tmp_path, "b", source, rows_per_shard=70, **settings)
    old = read_rows(a)["token_ids"][1077].as_py()[0]
    put(a, "token_ids", 77, lambda ids: [(ids[0] + 1) % 257], part="part-00002.parquet")
    put(a, "logprobs", 78, nudge(0, 0.5), part="part-00002.parquet")

    comparison = compare(a, b)

    assert comparison.tokens_differing == [RowDifference(1077, 0, (old + 1) % 257, old)]
    assert comparison.logprob_row == 1078
    assert (comparison.rows_compared, comparison.rows_differing) == (1100, 2)


def test_an_answer_that_goes_on_in_one_parts_where_the_other_ends(tmp_path: Path) -> None:
    a = run(tmp_path, "a", max_new_tokens=3)
    b = run(tmp_path, "b", max_new_tokens=5)

    comparison = compare(a, b)

    longer = read_rows(b)["token_ids"].to_pylist()
    assert comparison.tokens_differing == [
        RowDifference(row, 3, None, ids[3]) for row, ids in enumerate(longer)
    ]
    assert comparison.columns_differing == {
        "text": 7, "token_ids": 7, "num_generated_tokens": 7,
    }  # fmt: skip
    assert "(ended)" in diff(a, b).output


def test_the_greatest_difference_of_a_logprob_has_its_row(tmp_path: Path) -> None:
    a = run(tmp_path, "a", logprobs=0)
    b = run(tmp_path, "b", logprobs=0)
    for row, by in ((1, 1e-3), (4, -1e-2), (6, 5e-3)):
        put(b, "logprobs", row, nudge(2, by))

    comparison = compare(a, b)

    # 1e-6: float32 near 4.
    assert comparison.logprob_difference == pytest.approx(1e-2, abs=1e-6)
    assert comparison.logprob_row == 4
    assert comparison.columns_differing == {"logprobs": 3}
    assert comparison.tokens_differing == []
    result = diff(a, b)
    assert result.return_value == 1
    assert result.output == (
        "7 rows compared: 3 differ, 0 of them in their tokens\n"
        "  logprobs differs in 3 rows\n"
        "greatest difference of a logprob: 0.01 nats, in row 4\n"
        "different\n"
    )


def test_logprobs_are_compared_only_where_the_tokens_before_are_the_same(tmp_path: Path) -> None:
    a = run(tmp_path, "a", logprobs=0)
    b = run(tmp_path, "b", logprobs=0)
    put(b, "token_ids", 2, lambda ids: [ids[0], (ids[1] + 1) % 257, *ids[2:]])
    put(b, "logprobs", 2, lambda values: [values[0] + 0.25, values[1] + 7, values[2] + 8, 0.0])

    comparison = compare(a, b)

    assert comparison.logprob_difference == pytest.approx(0.25, abs=1e-6)
    assert comparison.logprob_row == 2


def test_a_logprob_that_is_no_number_hides_no_other(tmp_path: Path) -> None:
    """The greatest of numbers and NaN is NaN, which is greater than nothing."""
    a = run(tmp_path, "a", logprobs=0)
    b = run(tmp_path, "b", logprobs=0)
    for folder in (a, b):
        put(folder, "logprobs", 3, lambda values: [float("nan"), *values[1:]])
    put(b, "logprobs", 3, nudge(1, 0.5))

    comparison = compare(a, b)

    assert comparison.logprob_difference == pytest.approx(0.5, abs=1e-6)
    assert comparison.logprob_row == 3


def test_logits_that_differ_are_counted_by_row(tmp_path: Path) -> None:
    """9 rows are two stretches where there are logits."""
    source = write_prompts(tmp_path / "in.parquet", [f"{i}" for i in range(9)])
    a = run(tmp_path, "a", source, output_logits=True)
    b = run(tmp_path, "b", source, output_logits=True, rows_per_shard=9)
    for row in (0, 8):
        put(b, "logits", row, lambda rows: [nudge(5, 0.01)(rows[0]), *rows[1:]])

    comparison = compare(a, b)

    assert comparison.columns_differing == {"logits": 2}
    assert (comparison.rows_differing, comparison.rows_compared) == (2, 9)


def test_one_output_may_be_longer(tmp_path: Path) -> None:
    a = run(tmp_path, "a", limit=3)
    b = run(tmp_path, "b", rows_per_shard=2)

    result = diff(a, b)

    assert result.return_value == 1
    assert result.output == (
        "3 rows compared: 0 differ, 0 of them in their tokens\n"
        "3 rows in the first, 7 in the second\n"
        "different\n"
    )
    comparison = compare(b, a)
    assert (comparison.rows_a, comparison.rows_b, comparison.rows_compared) == (7, 3, 3)
    assert not comparison.is_same


def test_columns_of_one_alone_are_named(tmp_path: Path) -> None:
    a = run(tmp_path, "a", keep=())
    b = run(tmp_path, "b", logprobs=1, keep=("id",))

    result = diff(a, b)

    assert result.return_value == 1
    assert result.output == (
        "7 rows compared: 0 differ, 0 of them in their tokens\n"
        "columns that only one has, or with another type: cumulative_logprob, input column id, "
        "logprobs, top_ids, top_logprobs\n"
        "different\n"
    )
    assert compare(a, b).rows_differing == 0


def test_columns_of_another_type_are_not_compared(tmp_path: Path) -> None:
    a = run(tmp_path, "a", output_logits=True, logprobs=1)
    b = run(tmp_path, "b", output_logits=True, logits_dtype="float16", logprobs=2)

    comparison = compare(a, b)

    assert comparison.columns_of_one == ["logits", "top_ids", "top_logprobs"]
    assert comparison.rows_differing == 0
    assert not comparison.is_same


def test_an_error_is_an_answer_of_no_tokens(tmp_path: Path) -> None:
    good = write_prompts(tmp_path / "good.parquet", ["abc", "def", "g"])
    bad = write_prompts(tmp_path / "bad.parquet", ["abc", None, ""])
    a = run(tmp_path, "a", good, keep=(), logprobs=0)
    b = run(tmp_path, "b", bad, keep=(), logprobs=0)

    comparison = compare(a, b)

    answers = read_rows(a)["token_ids"].to_pylist()
    assert comparison.tokens_differing == [
        RowDifference(1, 0, answers[1][0], None), RowDifference(2, 0, answers[2][0], None),
    ]  # fmt: skip
    assert comparison.rows_differing == 2
    assert comparison.columns_differing["error"] == 2
    assert comparison.columns_differing["finish_reason"] == 2
    assert comparison.columns_differing["logprobs"] == 2
    assert compare(b, b).is_same


def test_errors_that_differ_are_a_difference(tmp_path: Path) -> None:
    a = run(tmp_path, "a", write_prompts(tmp_path / "a.parquet", ["abc", None]), keep=())
    b = run(tmp_path, "b", write_prompts(tmp_path / "b.parquet", ["abc", ""]), keep=())

    comparison = compare(a, b)

    assert comparison.columns_differing["error"] == 1
    assert (comparison.rows_differing, comparison.tokens_differing) == (1, [])


def test_nan_and_null_are_equal_to_themselves(tmp_path: Path) -> None:
    """One cell of each column differs, so that all others are looked at one by one."""
    nan = float("nan")
    columns = {
        "number": pa.array([nan, None, 1.0, nan, 0.5]),
        "list": pa.array([[nan], [None], None, [], [1.0, nan]]),
        "struct": pa.array([{"x": nan}, None, {"x": None}, {"x": 1.0}, {"x": 2.0}]),
        "word": pa.array(["a", None, "", "b", "c"]),
    }
    changed = {
        "number": pa.array([nan, None, 1.0, 2.0, nan]),
        "list": pa.array([[nan], [None], None, [], [1.0, 2.0]]),
        "struct": pa.array([{"x": nan}, None, {"x": None}, {"x": 1.0}, None]),
        "word": pa.array(["a", None, "", "b", None]),
    }
    a = run(tmp_path, "a", write_prompts(tmp_path / "a.parquet", ["x"] * 5, **columns))
    b = run(tmp_path, "b", write_prompts(tmp_path / "b.parquet", ["x"] * 5, **changed))

    comparison = compare(a, b)

    assert comparison.columns_differing == {
        "input column number": 2, "input column list": 1, "input column struct": 1,
        "input column word": 1,
    }  # fmt: skip
    assert comparison.rows_differing == 2
    assert compare(a, a).is_same
    assert json.loads(diff(a, a, "--json").output)["columns_differing"] == {}


@pytest.mark.parametrize(
    ("left", "right", "type_"),
    [
        ([1.0, None], [1.0, float("nan")], pa.list_(pa.float64())),
        ([2**53, None], [2**53 + 1, None], pa.list_(pa.int64())),
        ([None, [1, 2]], [[1, 2], None], pa.list_(pa.list_(pa.int64(), 2))),
        (None, [], pa.list_(pa.int64())),
        ([1, 2], [2, 1], pa.list_(pa.int64(), 2)),
        ({"x": [1]}, {"x": [2]}, pa.struct({"x": pa.list_(pa.int64())})),
        ([("k", 1)], [("k", 2)], pa.map_(pa.string(), pa.int64())),
    ],
    ids=["null and NaN", "large numbers beside a null", "a null among fixed lists",
         "null and empty", "fixed lists", "lists in structs", "maps"],
)  # fmt: skip
def test_no_difference_inside_of_a_cell_is_missed(
    tmp_path: Path, left: object, right: object, type_: pa.DataType
) -> None:
    a, b = (
        run(tmp_path, name, write_prompts(tmp_path / f"{name}.parquet", ["x"],
                                          cell=pa.array([cell], type_)))
        for name, cell in (("a", left), ("b", right))
    )  # fmt: skip

    assert compare(a, b).columns_differing == {"input column cell": 1}


def test_logprobs_that_are_no_numbers_are_equal_to_themselves(tmp_path: Path) -> None:
    a = run(tmp_path, "a", logprobs=0)
    put(a, "logprobs", 3, lambda values: [float("nan"), float("-inf"), *values[2:]])

    comparison = compare(a, a)

    assert comparison.is_same
    assert comparison.logprob_difference == 0.0


def test_kept_columns_of_any_type_are_compared_by_value(tmp_path: Path) -> None:
    """Parts have dictionaries of their own: the numbers in them mean nothing to others."""
    words = pa.array(["x", "y", None, "x", "z", "y"])
    source = write_prompts(
        tmp_path / "in.parquet",
        [f"{i}" for i in range(6)],
        word=words.dictionary_encode(),
        nested=pa.array([[{"a": [1, None]}], None, [], [{"a": None}], [None], [{"a": [2]}]]),
        bytes=pa.array([b"\xff", b"", None, b"a", b"b", b"c"]),
    )
    a = run(tmp_path, "a", source)
    b = run(tmp_path, "b", source, rows_per_shard=2, output_format="arrow")

    assert compare(a, b).is_same


def test_a_dictionary_of_other_words_costs_only_the_rows_that_differ(tmp_path: Path) -> None:
    prompts = ["a", "b", "c", "d"]
    columns = [pa.array(words).dictionary_encode() for words in (list("xyzx"), list("yyzx"))]
    a = run(tmp_path, "a", write_prompts(tmp_path / "a.parquet", prompts, word=columns[0]))
    b = run(tmp_path, "b", write_prompts(tmp_path / "b.parquet", prompts, word=columns[1]))

    comparison = compare(a, b)

    assert comparison.columns_differing == {"input column word": 1}
    assert comparison.rows_differing == 1


def test_dictionaries_of_parts_are_no_difference(tmp_path: Path) -> None:
    """The words of the second stretch are alone in the small part, and not in the big one."""
    for name, word, num_rows in (("0", "x", 1024), ("1", "y", 10)):
        words = pa.array([word] * num_rows).dictionary_encode()
        write_prompts(tmp_path / "in" / f"{name}.parquet", ["a"] * num_rows, word=words)
    settings = {"max_new_tokens": 1, "rows_per_batch": 64}
    a = run(tmp_path, "a", tmp_path / "in", rows_per_shard=1034, **settings)
    b = run(tmp_path, "b", tmp_path / "in", rows_per_shard=1024, **settings)

    assert compare(a, b).columns_differing == {}


def test_text_that_is_no_utf8_is_compared_too(tmp_path: Path) -> None:
    """Such a prompt is an error row, and is carried along as it is."""
    outputs = []
    for name, cell in (("a", b"\xff"), ("b", b"\xfe")):
        column = pa.Array.from_buffers(
            pa.string(), 2, [None, pa.array([0, 1, 2], pa.int32()).buffers()[1],
                             pa.py_buffer(cell + b"x")],
        )  # fmt: skip
        source = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"prompt": column}), source)
        outputs.append(run(tmp_path, name, source))

    comparison = compare(*outputs)

    assert comparison.columns_differing["input column prompt"] == 1
    assert comparison.rows_differing == 1


def test_an_input_column_may_be_called_as_ours_is_without_its_prefix(tmp_path: Path) -> None:
    """That is what a prefix is for."""
    source = write_prompts(tmp_path / "in.parquet", ["a", "b"], text=["x", "y"])
    a = run(tmp_path, "a", source, output_prefix="b_")
    b = run(tmp_path, "b", source, output_prefix="b_", max_new_tokens=3)

    assert compare(a, a).is_same
    assert compare(a, b).rows_differing == 2


def test_an_input_column_that_is_called_like_ours_may_hold_anything(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a", "b"], logprobs=["x", "y"])
    a = run(tmp_path, "a", source)
    b = run(tmp_path, "b", source, max_new_tokens=3)

    comparison = compare(a, b)

    assert len(comparison.tokens_differing) == 2
    assert comparison.logprob_row is None


def test_outputs_of_no_rows_are_the_same(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "empty.parquet", [])
    a = run(tmp_path, "a", source)
    b = run(tmp_path, "b", source, output_format="arrow")
    full = run(tmp_path, "full")

    assert diff(a, a).output == "the same: 0 rows, every part the same bytes\n"
    assert diff(a, b).return_value == 0
    assert diff(a, full).return_value == 1
    assert compare(full, a).rows_compared == 0


def test_what_is_no_output_is_an_error(tmp_path: Path) -> None:
    a = run(tmp_path, "a")
    unfinished = prepared(echo_job(tmp_path / "in.parquet", tmp_path / "unfinished")).job.output
    (tmp_path / "plain").mkdir()

    said = {}
    for name in ("unfinished", "plain", "nothing"):
        for pair in ((a, tmp_path / name), (tmp_path / name, a)):
            with pytest.raises(OutputError) as caught:
                diff(*pair)
            assert exit_code(caught.value) == 1
            said[name] = str(caught.value)
    assert said["unfinished"] == incomplete(Path(unfinished), FIRST)
    assert said["plain"].startswith(f"{tmp_path}/plain: not the output of a job: ")
    assert said["nothing"].startswith(f"{tmp_path}/nothing: not the output of a job: ")


def incomplete(folder: Path, part: str) -> str:
    return (
        f"{folder}: {part} is missing, so that rows would be compared with others. Go on with "
        "--resume."
    )


def test_an_output_with_a_part_missing_is_not_compared(tmp_path: Path) -> None:
    """All rows after the gap would be compared with others than their own."""
    a = run(tmp_path, "a", rows_per_shard=3)
    b = run(tmp_path, "b", rows_per_shard=3)
    (b / "part-00001.parquet").unlink()

    for pair in ((a, b), (b, a)):
        with pytest.raises(OutputError) as caught:
            compare(*pair)
        assert str(caught.value) == incomplete(b, "part-00001.parquet")


def test_a_folder_of_another_version_is_an_error(tmp_path: Path) -> None:
    """What cannot be understood once ended in a traceback."""
    a = run(tmp_path, "a")
    b = run(tmp_path, "b")
    (b / "_job.json").write_text("{}")

    with pytest.raises(OutputError, match=f"{b}: _job.json and _plan.json are from another ver"):
        compare(a, b)


def test_a_part_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    a = run(tmp_path, "a")
    b = run(tmp_path, "b")
    (b / FIRST).write_bytes((b / FIRST).read_bytes()[:-9])

    with pytest.raises(OutputError, match=f"{b}/{FIRST}: cannot be read"):
        compare(a, b)


def test_the_command_lists_rows_up_to_the_limit(tmp_path: Path) -> None:
    a = run(tmp_path, "a")
    b = run(tmp_path, "b", max_new_tokens=3)

    listed = [diff(a, b, "--limit", limit).output.splitlines() for limit in (0, 2, 7)]

    ids = read_rows(a)["token_ids"].to_pylist()
    summary = [
        "7 rows compared: 7 differ, 7 of them in their tokens",
        "  text differs in 7 rows",
        "  token_ids differs in 7 rows",
        "  num_generated_tokens differs in 7 rows",
        "different",
    ]
    assert listed[0] == summary
    assert listed[1][4:] == summary
    assert [line.split() for line in listed[1][1:4]] == [
        ["0", "3", str(ids[0][3]), "(ended)"],
        ["1", "3", str(ids[1][3]), "(ended)"],
        ["and", "5", "more"],
    ]
    assert listed[2][8:] == summary


def test_json_is_one_object(tmp_path: Path) -> None:
    a = run(tmp_path, "a", logprobs=0)
    b = run(tmp_path, "b", logprobs=0)
    same = diff(a, b, "--json")
    put(b, "token_ids", 1, lambda ids: [*ids[:3], (ids[3] + 1) % 257])
    put(b, "logprobs", 5, nudge(0, 0.5))
    different = diff(a, b, "--json")
    none = diff(a, b, "--json", "--limit", 0)

    assert (same.return_value, different.return_value) == (0, 1)
    assert json.loads(same.output) == {
        "rows_a": 7, "rows_b": 7, "rows_compared": 7, "rows_differing": 0,
        "columns_differing": {}, "columns_of_one": [], "tokens_differing": [],
        "logprob_difference": 0.0, "logprob_row": None, "rows_with_other_tokens": 0,
        "is_same": True, "same_bytes": True,
    }  # fmt: skip
    token_id = read_rows(a)["token_ids"][1].as_py()[3]
    said = json.loads(different.output)
    assert said["tokens_differing"] == [
        {"row_id": 1, "place": 3, "a": token_id, "b": (token_id + 1) % 257}
    ]
    assert said["columns_differing"] == {"token_ids": 1, "logprobs": 1}
    assert (said["rows_differing"], said["rows_with_other_tokens"]) == (2, 1)
    assert said["logprob_difference"] == pytest.approx(0.5, abs=1e-6)
    assert said["logprob_row"] == 5
    assert (said["is_same"], said["same_bytes"]) == (False, False)
    assert json.loads(none.output) == said | {"tokens_differing": []}


def test_json_holds_no_number_that_json_does_not_have(tmp_path: Path) -> None:
    """Infinity and NaN are read by Python alone."""
    a = run(tmp_path, "a", logprobs=0)
    b = run(tmp_path, "b", logprobs=0)
    put(b, "logprobs", 1, lambda values: [float("-inf"), *values[1:]])

    output = diff(a, b, "--json").output

    unread: list[str] = []
    said = json.loads(output, parse_constant=unread.append)
    assert unread == []
    assert (said["logprob_difference"], said["logprob_row"]) == (None, 1)


def test_the_command_ends_with_its_code(tmp_path: Path) -> None:
    a = run(tmp_path, "a")
    b = run(tmp_path, "b", max_new_tokens=3)

    same = run_command("diff", a, a)
    different = run_command("diff", a, b)
    nothing = run_command("diff", a, tmp_path / "nothing")
    usage = run_command("diff", a, b, "--limit", "-1")

    codes = [result.returncode for result in (same, different, nothing, usage)]
    assert codes == [0, 1, 1, 2]
    assert nothing.stdout == ""
    assert nothing.stderr.startswith(f"Error: {tmp_path}/nothing: not the output of a job: ")
