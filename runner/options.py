"""Flags of the command line, and the job that they ask for."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from cluster.placement import Placement
from jobs.job import Job, Packing
from jobs.model import ModelRef
from jobs.sampling import NOTHING_DRAWN, Sampling
from jobs.scoring import Scoring
from jobs.tolerance import Tolerance
from runner.config import load_config
from runner.flags import COMMANDS, Flag

Values = Mapping[str, Any]
"What click hands over: each flag's value, by its key."
Command = TypeVar("Command", bound=Callable[..., object])


_BEFORE: tuple[Callable[..., Any], ...] = (
    click.argument("input", required=False),
    click.argument("output", required=False),
    click.option("-i", "--input", "input_option", metavar="PATH", help="INPUT, as a flag."),
    click.option("-o", "--output", "output_option", metavar="FOLDER", help="OUTPUT, as a flag."),
    click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False),
        is_eager=True,
        expose_value=False,
        callback=load_config,
        help="TOML file with the same names, underscores for dashes. Flags win over it.",
    ),
)
_AFTER: tuple[Callable[..., Any], ...] = (
    click.option("--resume", is_flag=True, help="Do what the same job has not finished in OUTPUT."),
    click.option("--retry-failed", is_flag=True, help="Also try rows again whose error may pass."),
    click.option("--overwrite", is_flag=True, help="Delete what an earlier job wrote to OUTPUT."),
    click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON on stdout."),
    click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors and the summary."),
    click.option("-v", "--verbose", is_flag=True, help="Print what workers print, and tracebacks."),
    click.pass_context,
)


def job_options(name: str) -> Callable[[Command], Command]:
    """Gives a command that runs a job its arguments, and the flags that the table has for it."""

    def decorate(command: Command) -> Command:
        for option in reversed((*_BEFORE, *map(_option, COMMANDS[name]), *_AFTER)):
            command = option(command)
        return command

    return decorate


def _option(flag: Flag) -> Callable[..., Any]:
    default = None if flag.multiple else _default(flag)
    settings: dict[str, Any] = {} if default is None else {"default": default}
    return click.option(
        *flag.names,
        flag.key,
        type=flag.value_type,
        multiple=flag.multiple,
        required=flag.required,
        show_default=flag.unset or default is not None,
        help=flag.help,
        **settings,
    )


def read_job(
    command: str, source: str, output: str, values: Values
) -> tuple[Job, Placement, Tolerance]:
    """Makes a command's job and how to run it of what was given.

    Raises SettingError for a bad value.
    """
    given: dict[type, dict[str, Any]] = {
        owner: {f.field: _value(f, values) for f in COMMANDS[command] if f.owner is owner}
        for owner in (ModelRef, Sampling, Scoring, Packing, Job, Placement, Tolerance)
    }
    placement, tolerance = Placement(**given[Placement]), Tolerance(**given[Tolerance])
    job = Job(
        input=source,
        output=output,
        model=ModelRef(**given[ModelRef]),
        sampling=Sampling(**given[Sampling]) if given[Sampling] else NOTHING_DRAWN,
        scoring=Scoring(**given[Scoring]) if given[Scoring] else None,
        packing=Packing(**given[Packing]),
        **given[Job],
    )
    return job, placement, tolerance


def _value(flag: Flag, values: Values) -> object:
    value = values[flag.key]
    return (tuple(value) or _default(flag)) if flag.multiple else value


def _default(flag: Flag) -> object:
    field = next(f for f in dataclasses.fields(flag.owner) if f.name == flag.field)
    return None if field.default is dataclasses.MISSING else field.default
