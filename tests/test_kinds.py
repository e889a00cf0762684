"""Cells into prompts: what each kind accepts, and the reason for each cell it cannot read."""

import pyarrow as pa
import pytest

from jobs.completion import RowError
from jobs.kinds import KINDS, SCORED_KINDS
from jobs.kinds.kind import Kind
from jobs.prompt import read_prompts
from jobs.sampling import row_seed
from jobs.scoring import Question

TEXT, IDS = KINDS["text prompts"], KINDS["token id prompts"]


def accepts(kind: Kind, type_: pa.DataType) -> bool:
    [cells] = kind.columns.values()
    return cells.accepts(type_)


def read(kind: Kind, *columns: pa.ChunkedArray) -> list[object]:
    return kind.read(dict(zip(kind.columns, columns, strict=False)))


def codes(values: list[object]) -> list[object]:
    return [value.code if isinstance(value, RowError) else value for value in values]


@pytest.mark.parametrize(
    "type_",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
)
def test_text_of_any_type_is_read(type_: pa.DataType) -> None:
    column = pa.chunked_array([pa.array(["a", None, ""], pa.string()).cast(type_)])

    assert accepts(TEXT, type_)
    assert codes(read(TEXT, column)) == ["a", "null_prompt", "empty_prompt"]


def test_a_column_of_nulls_is_rows_of_errors() -> None:
    """Case I01."""
    for kind in KINDS.values():
        assert accepts(kind, pa.null())
        assert codes(read(kind, pa.chunked_array([pa.nulls(2)]))) == ["null_prompt"] * 2


@pytest.mark.parametrize("type_", [pa.int64(), pa.binary(), pa.list_(pa.string())])
def test_what_is_no_text_is_not_accepted(type_: pa.DataType) -> None:
    assert not accepts(TEXT, type_)


def test_broken_bytes_cost_one_row() -> None:
    """to_pylist() alone raises for the whole column."""
    raw = pa.array([b"ok", b"a\xff\xfe", b"fine"], pa.binary())
    column = pa.chunked_array([pa.StringArray.from_buffers(3, *raw.buffers()[1:])])

    values = read(TEXT, column)

    assert codes(values) == ["ok", "wrong_type", "fine"]
    assert "no valid UTF-8" in values[1].message


@pytest.mark.parametrize(
    "type_",
    [
        pa.list_(pa.int32()),
        pa.list_(pa.int64()),
        pa.large_list(pa.uint16()),
        pa.list_(pa.int8(), 2),
        pa.list_view(pa.int32()),
    ],
)
def test_lists_of_integers_of_any_width_are_read(type_: pa.DataType) -> None:
    assert accepts(IDS, type_)
    assert read(IDS, pa.chunked_array([pa.array([[1, 2], None], type_)]))[0] == (1, 2)


def test_bad_lists_are_told_apart() -> None:
    """Case G30."""
    column = pa.chunked_array([pa.array([[3, 4], None, [], [1, None], [5279552648203111001]])])

    values = read(IDS, column)

    assert codes(values) == [
        (3, 4), "null_prompt", "empty_prompt", "invalid_token_id", (5279552648203111001,),
    ]  # fmt: skip
    assert values[3].message == "The token id at place 1 is null."


@pytest.mark.parametrize("type_", [pa.int64(), pa.list_(pa.float64()), pa.string()])
def test_what_are_no_integers_in_lists_is_not_accepted(type_: pa.DataType) -> None:
    """Case G30: a column of [3.0] is refused as a whole, before anything starts."""
    assert not accepts(IDS, type_)


def test_prompts_carry_their_row_and_its_seed() -> None:
    columns = {"prompt_column": pa.chunked_array([pa.array(["a", None])])}
    prompts = read_prompts(TEXT, columns, first_row_id=70, job_seed=5)

    assert [(p.row_id, p.seed, p.text) for p in prompts] == [
        (70, row_seed(5, 70), "a"),
        (71, row_seed(5, 71), None),
    ]
    assert prompts[0].error is None
    assert prompts[1].error is not None


def column(values: list[object], type_: pa.DataType | None = None) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values, type_)])


def test_what_is_scored_may_be_text_or_token_ids() -> None:
    texts, pairs = SCORED_KINDS["texts"], SCORED_KINDS["continuations"]

    assert codes(read(texts, column(["a", None, ""]))) == [
        Question(("a",)), "null_prompt", "empty_prompt",
    ]  # fmt: skip
    assert codes(read(texts, column([[3, 4], []]))) == [Question(((3, 4),)), "empty_prompt"]
    assert codes(
        read(pairs, column(["", "c", None, "c"]), column([[5], [], [6], [7, None]]))
    ) == [
        Question(((5,),), ""), "empty_continuation", "null_prompt", "invalid_token_id",
    ]  # fmt: skip


def test_choices_that_cannot_be_are_told_apart() -> None:
    """Nulls in lists, lists without entries, entries without text, labels of no choice."""
    choices = [["x", "y"], None, [], ["x", None], ["x", ""], ["x"], ["x", "y"], ["x", "y"]]
    labels = [1, 0, 0, 0, 0, 1, -1, None]

    values = read(
        SCORED_KINDS["choices"], column(["c"] * len(choices)), column(choices), column(labels)
    )

    assert codes(values) == [
        Question(("x", "y"), "c", 1), "null_prompt", "empty_choices", "null_prompt",
        "empty_continuation", "invalid_label", "invalid_label", Question(("x", "y"), "c"),
    ]  # fmt: skip
    assert values[3].message == "The choice at place 1 is null."
    assert values[5].message == "The label is 1, and there are 1 choices."


def test_a_label_may_be_the_choice_itself() -> None:
    values = read(
        SCORED_KINDS["choices"],
        column(["c", "c"]), column([["x", "y"]] * 2), column(["y", "z"]),
    )  # fmt: skip

    assert codes(values) == [Question(("x", "y"), "c", 1), "invalid_label"]


def test_broken_bytes_in_a_list_of_choices_cost_one_row() -> None:
    raw = pa.array([b"ok", b"a\xff\xfe", b"fine"], pa.binary())
    texts = pa.StringArray.from_buffers(3, *raw.buffers()[1:])
    lists = pa.chunked_array([pa.ListArray.from_arrays([0, 1, 2, 3], texts)])

    values = read(SCORED_KINDS["choices"], column(["c"] * 3), lists)

    assert codes(values) == [Question(("ok",), "c"), "wrong_type", Question(("fine",), "c")]
