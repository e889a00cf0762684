"""The command as a user meets it: help, refusals with their exit codes, and that nothing starts."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from running import batchwright, write_prompts

from jobs.errors import InputError, JobError, ModelError, OutputError, RefusedError, WorkerError
from runner.cli import batchwright as command
from runner.cli import exit_code


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "in.parquet", ["a", "b"])


def refusal(source: object, output: Path, *arguments: object, engine: str = "echo") -> JobError:
    """Runs the command in this process until it refuses, and sees that nothing was started."""
    flags = ["--model", "echo", "--engine", engine, "--max-new-tokens", "4", *map(str, arguments)]
    result = CliRunner().invoke(command, ["run", str(source), str(output), *flags])
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
    assert not output.exists() or list(output.iterdir()) != []
    assert isinstance(result.exception, JobError), result.output
    return result.exception


def test_help_loads_neither_torch_nor_ray_nor_arrow() -> None:
    code = (
        "import sys\n"
        "from runner.cli import main\n"
        "sys.argv = ['batchwright', *sys.argv[1:]]\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop\n"
        "heavy = {'torch', 'ray', 'pyarrow', 'pandas', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    for arguments in (["--help"], ["run", "--help"], ["show", "--help"], ["--version"]):
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--top-k", "-2"], "top_k must be at least 1, or -1 or 0 for off, got -2."),
        (["--top-p", "1.1"], "top_p must be between 0 and 1, got 1.1."),
        (["--top-p", "nan"], "top_p must be between 0 and 1, got nan."),
        (["--temperature", "-1"], "temperature must be between 0 and 2, got -1.0."),
        (["--repetition-penalty", "0"], "repetition_penalty must be finite and above 0, got 0.0."),
        (["--presence-penalty", "inf"], "presence_penalty must be between -2 and 2, got inf."),
        (["--logprobs", "-1"], "logprobs must be at least 0, got -1."),
        (["--logprobs", "258"], "logprobs must be between 0 and 257, the size of the vocabulary"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0."),
        (["--max-new-tokens", "-1"], "max_new_tokens must be at least 1, got -1."),
        (["--max-new-tokens", "1000000000000"], "max_new_tokens must be between 1 and 8191, got"),
        (["--min-new-tokens", "5"], "min_new_tokens is 5, more than max_new_tokens, which is 4."),
        (["--stop-token-id", "-5"], "stop_token_id must be between 0 and 256, got -5."),
        (["--stop-token-id", "1000000000"], "stop_token_id must be between 0 and 256"),
        (["--max-model-len", "9000"], "rows of 9000 tokens were asked for, but Echo holds 8192."),
        (["--num-workers", "0"], "num_workers must be at least 1, got 0."),
        (["--rows-per-shard", "0"], "rows_per_shard must be at least 1, got 0."),
        (["--prompt-column", "nope"], "no column 'nope'. It has: id, prompt."),
        (["--prompt-column", "id"], "column 'id' holds int64; --prompt-column needs text."),
        (
            ["--token-ids-column", "prompt"],
            "column 'prompt' holds string; --token-ids-column needs lists of integers.",
        ),
        (["--keep", "nope"], "no column 'nope' to keep. It has: id, prompt."),
        (["--engine", "tensor"], "there is no engine 'tensor'. There are: torch, echo."),
        (["--device", "cuda"], "the echo engine runs on the CPU."),
        (["--gpus-per-worker", "nan"], "gpus_per_worker must be 0, a fraction of 1"),
        (["--cpus-per-worker", "0.00001"], "cpus_per_worker must be finite and at least 0.0001"),
        (
            ["--cpus-per-worker", "inf"],
            "cpus_per_worker must be finite and at least 0.0001, got inf.",
        ),
        (
            ["--output-logits", "--logits-budget", "1KiB"],
            "a row's logits and alternatives can take 4 tokens x 1,028 bytes = 4,112 bytes, more "
            "than the logits budget of 1,024.",
        ),
    ],
)
def test_a_bad_value_is_refused_before_anything_starts(
    source: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    """Cases G12, G14, G18, G27, G51."""
    error = refusal(source, tmp_path / "out", *arguments)

    assert words in str(error)
    assert exit_code(error) == 2


@pytest.mark.parametrize("seed", ["'42'", "1.5", "True"])
def test_a_seed_that_is_no_integer_is_a_usage_error(source: Path, seed: str) -> None:
    """Case G18."""
    result = CliRunner().invoke(
        command,
        ["run", str(source), "o", "--model", "x", "--max-new-tokens", "1", "--seed", seed],
    )

    assert result.exit_code == 2
    assert "--seed" in result.output


def test_an_unknown_flag_is_a_usage_error_that_knows_better(source: Path) -> None:
    result = CliRunner().invoke(command, ["run", str(source), "out", "--temprature", "1"])

    assert result.exit_code == 2
    assert "--temperature" in result.output


def test_max_new_tokens_must_be_given(source: Path) -> None:
    result = CliRunner().invoke(command, ["run", str(source), "out", "--model", "demo"])

    assert result.exit_code == 2
    assert "--max-new-tokens" in result.output


def test_input_and_output_are_given_once(source: Path) -> None:
    flags = ["--model", "echo", "--max-new-tokens", "1"]
    for arguments in ([], [str(source)], [str(source), "out", "-i", str(source)]):
        result = CliRunner().invoke(command, ["run", *arguments, *flags])
        assert result.exit_code == 2
        assert "as an argument or as a flag" in result.output


def test_what_is_wrong_with_the_input_is_said_before_the_model_loads(
    tmp_path: Path, source: Path
) -> None:
    """Case I07: columns match exactly, case and all."""
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"Prompt": ["a"], "PROMPT": ["b"]}), other)
    nothing = tmp_path / "nothing.parquet"
    pq.write_table(pa.table({}), nothing)
    both = tmp_path / "both.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "prompt_token_ids": [[1]]}), both)

    out = tmp_path / "out"
    assert str(refusal(tmp_path / "no.parquet", out)).endswith("no such file or folder.")
    assert "no column 'prompt' or 'prompt_token_ids'. It has: Prompt, PROMPT." in str(
        refusal(other, out, engine="torch")
    )
    assert "no column 'prompt'. It has: Prompt, PROMPT." in str(
        refusal(other, out, "--prompt-column", "prompt", engine="torch")
    )
    assert "It has: no columns." in str(refusal(nothing, out, engine="torch"))
    assert "has both 'prompt' and 'prompt_token_ids'. Choose with" in str(refusal(both, out))


def test_text_needs_a_tokenizer(source: Path, tmp_path: Path, models: dict[str, str]) -> None:
    error = refusal(source, tmp_path / "out", "--model", models["succ12"], engine="torch")

    assert "the model has no tokenizer, so text cannot be read" in str(error)


def test_a_model_that_is_not_there_is_refused_before_ray(source: Path, tmp_path: Path) -> None:
    error = refusal(source, tmp_path / "out", "--model", tmp_path / "none", engine="torch")

    assert isinstance(error, ModelError)
    assert exit_code(error) == 2


def test_a_folder_with_something_in_it_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()

    error = refusal(source, tmp_path / "out")
    assert exit_code(error) == 4
    assert exit_code(refusal(source, tmp_path / "out", "--overwrite")) == 4


def test_an_output_without_a_name_is_refused(source: Path) -> None:
    """An unset variable of the shell would otherwise mean the current folder."""
    result = CliRunner().invoke(
        command, ["run", str(source), "", "--model", "echo", "--max-new-tokens", "1"]
    )

    assert "the output folder has no name" in str(result.exception)


def test_an_output_inside_the_input_is_refused(source: Path) -> None:
    error = refusal(source.parent, source.parent / "out")

    assert "where another run would read it" in str(error)


def test_an_input_inside_the_output_is_refused_before_anything_is_deleted(tmp_path: Path) -> None:
    """--overwrite empties the folder, and would have taken the input with it."""
    out = tmp_path / "out"
    part = write_prompts(out / "part-00000.parquet", ["a"])
    (out / "_job.json").write_text("{}")

    for pattern in (part, out, f"{out}/*.parquet"):
        error = refusal(pattern, out, "--overwrite")
        assert "the input lies inside the output folder" in str(error)
    assert part.exists()


def test_an_output_that_a_pattern_would_find_is_refused(source: Path) -> None:
    error = refusal(f"{source.parent}/**/*.parquet", source.parent / "out")

    assert "where another run would read it" in str(error)


def test_a_file_without_the_prompt_column_is_named(source: Path, tmp_path: Path) -> None:
    """Case I07: its rows would all be errors that say something else."""
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"Prompt": ["a"]}), other)

    error = refusal(f"{tmp_path}/*.parquet", tmp_path / "out" / "x")

    assert f"{other}: no column 'prompt', which other files have." in str(error)


def test_messages_are_refused_for_want_of_a_prompt(tmp_path: Path) -> None:
    """Part of case G49: one clear error, before any worker starts."""
    path = tmp_path / "chat.parquet"
    pq.write_table(pa.table({"messages": [[{"role": "user", "content": "hi"}]]}), path)

    error = refusal(path, tmp_path / "out")

    assert "no column 'prompt' or 'prompt_token_ids'. It has: messages." in str(error)


def test_a_column_kept_twice_is_kept_once(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").touch()

    error = refusal(source, tmp_path / "out", "--keep", "id", "--keep", "id")

    assert isinstance(error, RefusedError)


def test_exit_codes_tell_what_kind_of_error_it_was() -> None:
    kinds = (InputError, RefusedError, OutputError, WorkerError)

    assert [exit_code(kind("x")) for kind in kinds] == [2, 4, 1, 1]


def test_the_command_prints_one_sentence_and_its_code(tmp_path: Path) -> None:
    result = batchwright(
        "run", tmp_path / "no.parquet", tmp_path / "out", "--model", "echo", "--engine", "echo",
        "--max-new-tokens", 1,
    )  # fmt: skip

    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == f"Error: {tmp_path}/no.parquet: no such file or folder.\n"
    assert os.listdir(tmp_path) == []
