"""Flags, configuration keys and fields are one list."""

import dataclasses
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from cluster.placement import Placement
from jobs.errors import SettingError
from jobs.job import Job, Packing
from jobs.model import ModelRef
from jobs.sampling import NOTHING_DRAWN, Sampling
from jobs.scoring import Scoring
from jobs.tolerance import Tolerance
from runner.cli import batchwright
from runner.flags import COMMANDS, FLAGS
from runner.options import job_options, read_job

OWNERS = (ModelRef, Sampling, Scoring, Packing, Job, Placement, Tolerance)
ELSEWHERE = {"input", "output", "model", "sampling", "scoring", "packing"}
"""Fields of Job that are no flags: two arguments, and four dataclasses with flags of their own."""


def values(**given: object) -> dict[str, object]:
    """What click hands over when these flags are given."""
    unset = {f.key: () if f.multiple else default(f) for f in FLAGS}
    return unset | {"model": "demo", "max_new_tokens": 3} | given


def default(flag: object) -> object:
    [field] = [f for f in dataclasses.fields(flag.owner) if f.name == flag.field]
    return None if field.default is dataclasses.MISSING else field.default


@pytest.mark.parametrize("owner", OWNERS)
def test_every_field_has_a_flag_and_every_flag_a_field(owner: type) -> None:
    fields = {field.name for field in dataclasses.fields(owner)} - ELSEWHERE

    assert {flag.field for flag in FLAGS if flag.owner is owner} == fields


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_help_and_shows_its_default(command: str) -> None:
    help_text = CliRunner().invoke(batchwright, [command, "--help"]).output
    words = " ".join(help_text.split())

    for flag in COMMANDS[command]:
        assert flag.help, flag.names
        for name in flag.names:
            assert name.split("/")[0] in words
        assert flag.unset or flag.required or flag.multiple or default(flag) is not None, flag.names


def test_unset_flags_are_the_dataclasses_own_defaults() -> None:
    job, placement, tolerance = read_job("run", "in", "out", values())

    assert job == Job("in", "out", ModelRef("demo"), Sampling(3))
    assert (placement, tolerance) == (Placement(), Tolerance())


def test_what_scores_draws_nothing() -> None:
    job, *_ = read_job("score", "in", "out", values(text_column="t", pmi=True))

    assert job == Job(
        "in", "out", ModelRef("demo"), NOTHING_DRAWN, Scoring(text_column="t", pmi=True)
    )


def test_a_key_of_another_command_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('model = "demo"\ntemperature = 0\n')

    with pytest.raises(click.BadParameter, match="score has no key 'temperature'"):
        parse("--config", str(path), name="score")


def test_given_flags_reach_their_fields() -> None:
    job, placement, tolerance = read_job(
        "run", "in", "out",
        values(threads_per_worker=2, top_p=0.5, stop_token_id=(4, 5), keep=("a",), rows_per_batch=8,
               logprobs=0, num_workers=3, max_errors="5%"),
    )  # fmt: skip

    assert job.model.threads == 2
    assert (job.sampling.top_p, job.sampling.stop_token_ids) == (0.5, (4, 5))
    assert (job.keep, job.logprobs, job.packing.rows_per_batch) == (("a",), 0, 8)
    assert placement.num_workers == 3
    assert tolerance.max_errors == "5%"


def test_a_bad_value_is_refused_in_the_words_of_its_field() -> None:
    with pytest.raises(SettingError, match=r"top_p must be between 0 and 1, got 2.0\."):
        read_job("run", "in", "out", values(top_p=2.0))


@pytest.mark.parametrize(
    ("text", "size"), [("5", 5), ("1KiB", 1024), ("1.5 MiB", 3 * 2**19), ("2gib", 2**31)]
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    [flag] = [flag for flag in FLAGS if flag.field == "logits_budget_bytes"]

    assert flag.value_type.convert(text, None, None) == size


def test_what_is_no_size_is_refused() -> None:
    [flag] = [flag for flag in FLAGS if flag.field == "logits_budget_bytes"]

    with pytest.raises(click.BadParameter, match="'much' is no size"):
        flag.value_type.convert("much", None, None)


def parse(*arguments: str, name: str = "run") -> dict[str, object]:
    """What a command that runs a job is called with."""
    seen: dict[str, object] = {}

    @click.command(name)
    @job_options(name)
    def command(ctx: click.Context, /, **given: object) -> None:
        seen.update(given)

    result = CliRunner().invoke(command, list(arguments), standalone_mode=False)
    if result.exception:
        raise result.exception
    return seen


def test_a_configuration_file_has_the_same_names_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        'model = "demo"\nmax_new_tokens = 5\ntop_p = 0.5\nstop_token_id = [1, 2]\n'
        "output_logits = true\n"
    )

    seen = parse("--config", str(path), "--top-p", "0.9")

    assert (seen["model"], seen["max_new_tokens"], seen["top_p"]) == ("demo", 5, 0.9)
    assert seen["stop_token_id"] == (1, 2)
    assert seen["output_logits"] is True


def test_a_configuration_file_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('model = "demo"\ntemprature = 0.5\n')

    with pytest.raises(click.BadParameter, match="run has no key 'temprature'"):
        parse("--config", str(path))


def test_a_configuration_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("model = ")

    with pytest.raises(click.BadParameter, match="cannot be read"):
        parse("--config", str(path))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("max_new_tokens = 2.9", "max_new_tokens must be int, got 2.9"),
        ("max_new_tokens = true", "max_new_tokens must be int, got True"),
        ("seed = 1.7", "seed must be int, got 1.7"),
        ("temperature = true", "temperature must be int or float, got True"),
        ("temperature = '1'", "temperature must be int or float, got '1'"),
        ("ignore_eos = 1", "ignore_eos must be bool, got 1"),
        ("model = 5", "model must be str, got 5"),
        ("stop_token_id = 5", "stop_token_id must be a list of int, got 5"),
        ("keep = ['a', 1]", "keep must be a list of str, got ['a', 1]"),
        ("top_p = [0.5]", "top_p must be int or float, got [0.5]"),
        ("logits_budget = 1.5", "logits_budget must be int or str, got 1.5"),
    ],
)
def test_values_of_another_type_than_the_flags_are_refused(
    tmp_path: Path, line: str, words: str
) -> None:
    """Click alone would make 2 of 2.9, and 1 of true."""
    path = tmp_path / "job.toml"
    path.write_text(line)

    with pytest.raises(click.BadParameter) as caught:
        parse("--config", str(path))

    assert words in caught.value.message


def test_sizes_can_be_written_with_units_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('model = "m"\nmax_new_tokens = 1\nlogits_budget = "2MiB"\n')

    assert parse("--config", str(path))["logits_budget"] == 2**21
