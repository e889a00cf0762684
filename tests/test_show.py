"""Looking at outputs: counts of all rows, and one row token by token."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from running import echo_job, make_job, run_here, write_prompts
from tiny_models import byte_tokenizer, save, table_model

from jobs.errors import InputError, OutputError
from jobs.model import ModelRef
from runner.cli import batchwright


def show(*arguments: object) -> str:
    result = CliRunner(env={"COLUMNS": "120"}).invoke(batchwright, ["show", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result.output


@pytest.fixture
def output(tmp_path: Path) -> Path:
    source = write_prompts(tmp_path / "in.parquet", ["abc", None, "defg", "h"])
    run_here(echo_job(source, tmp_path / "out", logprobs=2, output_logits=True, rows_per_shard=2))
    return tmp_path / "out"


def test_counts_reasons_and_lengths_are_shown(output: Path) -> None:
    text = show(output)

    assert "4 rows in 2 parts" in text
    assert [line.split() for line in text.splitlines() if line.startswith("length")] == [
        ["length", "3"]
    ]
    assert "null_prompt  1" in text
    assert "generated  12     4.0   4      4       4" in text
    assert "null_prompt: The prompt is null." in text


def test_a_row_is_shown_in_full_with_its_alternatives(output: Path) -> None:
    text = show(output, "--row", 2)

    assert "'defg'" in text
    assert "finish_reason" in text
    assert "not shown: large_list" in text
    assert text.split("alternatives")[1].strip().count("\n") == 3


def test_an_error_row_shows_its_error(output: Path) -> None:
    assert "null_prompt" in show(output, "--row", 1)


def test_rows_and_folders_that_are_not_there_are_said(output: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no row 4. Rows are 0 to 3\."):
        show(output, "--row", 4)
    with pytest.raises(OutputError, match="not the output of a job"):
        show(tmp_path / "nothing")


def test_tokens_are_spelled_with_their_spaces(tmp_path: Path) -> None:
    """Case G44: inside the tokenizer a space is written as U+0120."""
    following = [ord(" ") if i == ord(">") else 256 for i in range(257)]
    folder = save(table_model(following, eos=256), tmp_path / "m", tokenizer=byte_tokenizer())
    source = write_prompts(tmp_path / "in.parquet", [">"])
    run_here(make_job(source, tmp_path / "out", ModelRef(folder), logprobs=1))

    text = show(tmp_path / "out", "--row", 0)

    assert "' '" in text
    assert "'<eos>'" in text
    assert "\u0120" not in text


def test_peoples_text_is_shown_as_it_is(tmp_path: Path) -> None:
    """Brackets and colons mean something to the library that draws the tables."""
    texts = ["List[float]) -> [INST] hi [/INST] :smile:", "[bold]x[/y]"]
    source = write_prompts(tmp_path / "in.parquet", texts, **{"a[b]:x:": [1, 2]})
    run_here(echo_job(source, tmp_path / "out"))

    assert texts[0] in show(tmp_path / "out", "--row", 0)
    assert texts[1] in show(tmp_path / "out", "--row", 1)
    assert "a[b]:x:" in show(tmp_path / "out", "--row", 1)


def test_an_empty_output_has_no_rows_to_show(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", [])
    run_here(echo_job(source, tmp_path / "out"))

    assert "0 rows in 1 part" in show(tmp_path / "out")
    with pytest.raises(InputError, match="There are no rows"):
        show(tmp_path / "out", "--row", 0)


def test_without_a_tokenizer_ids_are_shown_and_it_is_said(
    tmp_path: Path, models: dict[str, str]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt_token_ids": [[3, 4]]}), tmp_path / "in.parquet")
    run_here(make_job(tmp_path / "in.parquet", tmp_path / "out", ModelRef(models["succ12"])))

    text = show(tmp_path / "out", "--row", 0)

    assert "tokens are shown by id alone" in text
    assert "(no tokenizer)" in show(tmp_path / "out")


def test_columns_of_an_earlier_job_are_not_taken_for_ours(tmp_path: Path) -> None:
    """An output is the input of the next job: its logprobs are columns like any other there."""
    source = write_prompts(tmp_path / "in.parquet", ["abc"])
    run_here(echo_job(source, tmp_path / "first", logprobs=2, max_new_tokens=2))
    first = tmp_path / "first" / "part-00000.parquet"
    run_here(echo_job(first, tmp_path / "second", output_prefix="b_", max_new_tokens=4))

    text = show(tmp_path / "second", "--row", 0)

    steps = text.split("alternatives")[1].strip().splitlines()
    assert len(steps) == 4
    assert not any("-" in step for step in steps)
    assert "b_finish_reason" in text


def test_a_row_is_shown_in_full_however_long(tmp_path: Path) -> None:
    import pyarrow as pa

    text = "x" * 500
    ids = pa.array([list(range(200))])
    source = write_prompts(tmp_path / "in.parquet", [text], ids=ids)
    run_here(echo_job(source, tmp_path / "out"))

    shown = "".join(show(tmp_path / "out", "--row", 0).split())

    assert shown.count("x") >= 500
    assert "198,199]" in shown
