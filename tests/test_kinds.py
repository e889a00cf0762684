"""Cells into prompts: what each kind accepts, and the reason for each cell it cannot read."""

import pyarrow as pa
import pytest

from jobs.completion import RowError
from jobs.kinds import KINDS
from jobs.prompt import read_prompts
from jobs.sampling import row_seed

TEXT, IDS = KINDS["prompt_column"], KINDS["token_ids_column"]


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

    assert TEXT.accepts(type_)
    assert codes(TEXT.read(column)) == ["a", "null_prompt", "empty_prompt"]


def test_a_column_of_nulls_is_rows_of_errors() -> None:
    """Case I01."""
    for kind in KINDS.values():
        assert kind.accepts(pa.null())
        assert codes(kind.read(pa.chunked_array([pa.nulls(2)]))) == ["null_prompt"] * 2


@pytest.mark.parametrize("type_", [pa.int64(), pa.binary(), pa.list_(pa.string())])
def test_what_is_no_text_is_not_accepted(type_: pa.DataType) -> None:
    assert not TEXT.accepts(type_)


def test_broken_bytes_cost_one_row() -> None:
    """to_pylist() alone raises for the whole column."""
    raw = pa.array([b"ok", b"a\xff\xfe", b"fine"], pa.binary())
    column = pa.chunked_array([pa.StringArray.from_buffers(3, *raw.buffers()[1:])])

    values = TEXT.read(column)

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
    assert IDS.accepts(type_)
    assert IDS.read(pa.chunked_array([pa.array([[1, 2], None], type_)]))[0] == (1, 2)


def test_bad_lists_are_told_apart() -> None:
    """Case G30."""
    column = pa.chunked_array([pa.array([[3, 4], None, [], [1, None], [5279552648203111001]])])

    values = IDS.read(column)

    assert codes(values) == [
        (3, 4), "null_prompt", "empty_prompt", "invalid_token_id", (5279552648203111001,),
    ]  # fmt: skip
    assert values[3].message == "The token id at place 1 is null."


@pytest.mark.parametrize("type_", [pa.int64(), pa.list_(pa.float64()), pa.string()])
def test_what_are_no_integers_in_lists_is_not_accepted(type_: pa.DataType) -> None:
    """Case G30: a column of [3.0] is refused as a whole, before anything starts."""
    assert not IDS.accepts(type_)


def test_prompts_carry_their_row_and_its_seed() -> None:
    prompts = read_prompts(
        TEXT, pa.chunked_array([pa.array(["a", None])]), first_row_id=70, job_seed=5
    )

    assert [(p.row_id, p.seed, p.text) for p in prompts] == [
        (70, row_seed(5, 70), "a"),
        (71, row_seed(5, 71), None),
    ]
    assert prompts[0].error is None
    assert prompts[1].error is not None
