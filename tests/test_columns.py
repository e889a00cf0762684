"""Completions into columns: one schema from the plan alone, and types that every reader knows."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from running import echo_job, run_here, write_prompts

from jobs.columns import COLUMNS
from jobs.columns.column import ragged
from jobs.completion import Completion, RowError
from jobs.errors import SettingError
from jobs.plan import Plan
from jobs.schema import output_schema, output_table
from runner.plan import make_plan

LOGPROBS = {"logprobs": 2, "output_logits": True}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "in.parquet", ["a", "b"], note=["x", None])


def plan_for(source: Path, **settings: object) -> Plan:
    return make_plan(echo_job(source, source.parent / "out", **settings))


def answered(row_id: int, num_tokens: int) -> Completion:
    return Completion(
        row_id=row_id,
        seed=2**64 - 1,
        finish_reason="length",
        num_prompt_tokens=1,
        token_ids=np.arange(num_tokens, dtype=np.int32),
        text="x",
        logprobs=np.full(num_tokens, -0.5, np.float32),
        top_ids=np.arange(num_tokens * 2, dtype=np.int32).reshape(-1, 2),
        top_logprobs=np.full((num_tokens, 2), -0.25, np.float32),
        logits=np.full((num_tokens, 257), row_id, np.float32),
    )


FAILED = Completion(
    row_id=1, seed=1, finish_reason="error", error=RowError("prompt", "null_prompt", "Null.")
)


def make_table(source: Path, completions: list[Completion], **settings: object) -> pa.Table:
    plan = plan_for(source, **settings)
    rows = pa.table({"id": range(len(completions)), "prompt": ["p"] * len(completions),
                     "note": ["n"] * len(completions)})  # fmt: skip
    table = output_table(plan, output_schema(plan), rows, completions)
    table.validate(full=True)
    return table


def test_columns_have_the_names_and_types_that_are_documented(source: Path) -> None:
    schema = output_schema(plan_for(source, **LOGPROBS))

    floats, ids = (pa.field("element", t, nullable=False) for t in (pa.float32(), pa.int32()))

    def vectors(element: pa.Field, width: int) -> pa.DataType:
        return pa.large_list(pa.field("element", pa.list_(element, width), nullable=False))

    assert {field.name: field.type for field in schema} == {
        "row_id": pa.int64(),
        "sample_index": pa.int32(),
        "id": pa.int64(),
        "prompt": pa.string(),
        "note": pa.string(),
        "text": pa.large_string(),
        "token_ids": pa.large_list(ids),
        "num_prompt_tokens": pa.int32(),
        "num_generated_tokens": pa.int32(),
        "finish_reason": pa.string(),
        "stop_reason": pa.string(),
        "truncated": pa.bool_(),
        "seed": pa.uint64(),
        "logprobs": pa.large_list(floats),
        "cumulative_logprob": pa.float64(),
        "top_ids": vectors(ids, 2),
        "top_logprobs": vectors(floats, 2),
        "logits": vectors(floats, 257),
        "error": pa.struct(
            [
                ("stage", pa.string()),
                ("code", pa.string()),
                ("message", pa.large_string()),
                ("attempts", pa.int32()),
                ("retryable", pa.bool_()),
            ]
        ),
    }
    assert not any(schema.field(name).nullable for name in ("row_id", "finish_reason"))


def test_every_column_of_ours_says_what_it_means(source: Path) -> None:
    schema = output_schema(plan_for(source, **LOGPROBS))

    for field in schema:
        if field.name not in ("id", "prompt", "note"):
            assert field.metadata[b"meaning"]
    assert schema.field("logprobs").metadata[b"unit"] == b"nats"
    assert b"before temperature" in schema.field("logprobs").metadata[b"meaning"]
    assert b"before penalties" in schema.field("logits").metadata[b"meaning"]
    assert b"threads_per_worker" in schema.metadata[b"batchwright.job"]


def test_the_schema_says_nothing_of_where_files_lie(source: Path) -> None:
    """Else the same job in two folders would not be the same bytes."""
    schema = output_schema(plan_for(source))

    assert str(source.parent).encode() not in schema.metadata[b"batchwright.job"]


def test_columns_that_are_not_asked_for_are_not_there(source: Path) -> None:
    plain = output_schema(plan_for(source)).names
    chosen = output_schema(plan_for(source, logprobs=0)).names

    assert not {"logprobs", "top_ids", "logits"} & set(plain)
    assert set(chosen) - set(plain) == {"logprobs", "cumulative_logprob"}


def test_rows_of_unlike_length_and_failed_rows_stand_side_by_side(source: Path) -> None:
    table = make_table(source, [answered(0, 1), FAILED, answered(2, 3)], **LOGPROBS)

    assert table["token_ids"].to_pylist() == [[0], None, [0, 1, 2]]
    assert table["num_generated_tokens"].to_pylist() == [1, None, 3]
    assert table["logprobs"].to_pylist() == [[-0.5], None, [-0.5] * 3]
    assert table["cumulative_logprob"].to_pylist() == [-0.5, None, -1.5]
    assert table["top_ids"].to_pylist() == [[[0, 1]], None, [[0, 1], [2, 3], [4, 5]]]
    assert np.array(table["logits"][2].as_py()).shape == (3, 257)
    assert table["logits"][1].as_py() is None
    assert table["seed"].to_pylist() == [2**64 - 1, 1, 2**64 - 1]
    assert table["error"].to_pylist() == [
        None,
        {"stage": "prompt", "code": "null_prompt", "message": "Null.", "attempts": 1,
         "retryable": False},
        None,
    ]  # fmt: skip


@pytest.mark.parametrize("completions", [[], [FAILED], [answered(0, 2)]])
def test_the_schema_is_the_same_whatever_the_rows(
    source: Path, completions: list[Completion]
) -> None:
    """Case O01: a column that is all null, all set or empty keeps its type."""
    table = make_table(source, completions, **LOGPROBS)

    assert table.schema.equals(output_schema(plan_for(source, **LOGPROBS)), check_metadata=True)
    assert table.num_rows == len(completions)


def test_only_types_of_arrow_itself_are_used(source: Path) -> None:
    schema = output_schema(plan_for(source, **LOGPROBS))

    assert not any(isinstance(field.type, pa.BaseExtensionType) for field in schema)


def test_half_precision_logits_are_written_as_float16(source: Path) -> None:
    table = make_table(source, [answered(0, 2)], output_logits=True, logits_dtype="float16")

    assert table.schema.field("logits").type.value_type.value_type == pa.float16()
    assert table["logits"][0].as_py()[1][256] == 0.0


def test_lists_of_vectors_pass_the_limit_of_int32(source: Path) -> None:
    """Case O03: 2**31 - 1 numbers are 43,690 tokens of 49,152 words; a plain list overflows there.

    Two rows of 16,384 tokens of a vocabulary of 98,304 are 3.2e9 numbers; zeros that are never
    touched take no memory.
    """
    width, num_tokens = 98_304, 16_384
    vector = pa.list_(pa.field("element", pa.float32(), nullable=False), width)
    zeros = np.zeros((num_tokens, width), np.float32)

    rows = [ragged([zeros], vector), ragged([zeros], vector)]
    column = pa.chunked_array(rows)

    assert pa.types.is_large_list(column.type)
    assert len(column) == 2
    assert sum(len(chunk.values.values) for chunk in column.chunks) == 2 * num_tokens * width


def test_one_row_of_logits_is_not_copied() -> None:
    matrix = np.ones((3, 4), np.float32)
    vector = pa.list_(pa.field("element", pa.float32(), nullable=False), 4)

    array = ragged([matrix], vector)
    matrix[2, 3] = 7.0

    assert array.to_pylist()[0][2][3] == 7.0


def test_a_clash_of_names_is_refused_with_the_remedies(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a"], text=["old"], seed=[1])

    with pytest.raises(SettingError) as caught:
        plan_for(source)

    assert str(caught.value) == (
        "the input has columns that the output would have too: seed, text. "
        "Give our columns other names with --output-prefix, or choose with --keep."
    )


def test_a_prefix_or_a_choice_of_columns_resolves_a_clash(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a"], text=["old"])

    prefixed, _ = run_here(echo_job(source, tmp_path / "a", output_prefix="new_"))
    chosen, _ = run_here(echo_job(source, tmp_path / "b", keep=("id",)))

    assert prefixed["text"].to_pylist() == ["old"]
    assert len(prefixed["new_text"][0].as_py()) > 0
    assert chosen.column_names[:4] == ["row_id", "sample_index", "id", "text"]


def test_the_table_of_columns_is_what_the_schema_is_made_of(source: Path) -> None:
    plan = plan_for(source, **LOGPROBS)

    ours = [field.name for column in COLUMNS.values() for field in column.fields(plan)]
    assert [n for n in output_schema(plan).names if n not in ("id", "prompt", "note")] == ours
