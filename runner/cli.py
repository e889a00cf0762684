"""The command line: options in, words out. No logic of its own.

Exit codes: 0 every row answered, 1 the job failed, 2 a bad value, 3 some rows are errors,
4 the output folder is not free, 130 or 143 stopped.
"""

import logging
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn, cast

import click
from click.core import ParameterSource

from jobs.errors import JobError, OutputError, RefusedError, StoppedError, WorkerError
from runner.config import PLACES
from runner.options import job_options, read_job

_BEGUN = time.perf_counter()
"When the command began, but for Python's own start and what is imported above."

if TYPE_CHECKING:
    from jobs.output import Start  # At run time it would bring Arrow with it.

_EXIT_CODES: tuple[tuple[type[JobError], int], ...] = (
    (RefusedError, 4),
    (WorkerError, 1),
    (OutputError, 1),
    (JobError, 2),
)
"The first that fits."
_SOME_ROWS_FAILED = 3
_DIFFERENT = 1
"What verify and diff end with when all is not well."
_INTERRUPTED = 130


def main() -> NoReturn:
    """Runs the command and exits with its code."""
    try:
        sys.exit(batchwright.main(standalone_mode=False) or 0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(_INTERRUPTED)
    except JobError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(exit_code(error))


def exit_code(error: JobError) -> int:
    """The code that says what kind of error ended the command."""
    return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="batchwright")
def batchwright() -> None:
    """Runs a language model over a data set: Parquet in, Arrow or Parquet out."""


@batchwright.command()
@job_options("run")
def run(ctx: click.Context, /, **values: Any) -> int:
    """Answers every row of INPUT with a model, and writes OUTPUT.

    INPUT is a Parquet file, a folder of them, or a glob; OUTPUT a folder that is new or empty. Both
    must be on storage that all workers see. A job that was broken off goes on with --resume.
    """
    return _run_job(ctx, **values)


@batchwright.command()
@job_options("score")
def score(ctx: click.Context, /, **values: Any) -> int:
    """Tells how likely a model holds what is in the rows of INPUT, and writes OUTPUT.

    A row is a text, a context with its continuation, or a context with a list of choices. Nothing
    is generated. INPUT, OUTPUT and --resume are as for run.
    """
    return _run_job(ctx, **values)


def _run_job(
    ctx: click.Context,
    input: str | None,
    output: str | None,
    resume: bool,
    retry_failed: bool,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **values: object,
) -> int:
    from runner.progress import show_run
    from runner.run import run_job
    from runner.signals import Signals

    source, target = _one_of(ctx, "input", input), _one_of(ctx, "output", output)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    for name in ("runner", "cluster", "workers", "jobs"):
        level = logging.DEBUG if verbose else logging.ERROR if quiet else logging.INFO
        logging.getLogger(name).setLevel(level)
    job, placement, tolerance = read_job(str(ctx.command.name), source, target, values)
    start = _start(resume=resume, retry_failed=retry_failed, overwrite=overwrite)
    signals = Signals()
    try:
        with signals.taken():
            reports = run_job(
                job, placement, tolerance, start=start, stop=signals.stop, begun=_BEGUN
            )
            counts = show_run(reports, target, quiet=quiet, as_json=as_json)
    except StoppedError as error:
        click.echo(str(error), err=True)
        return signals.exit_code
    return _SOME_ROWS_FAILED if counts.failed_rows else 0


def _start(**flags: bool) -> "Start":
    given = [name for name, is_given in flags.items() if is_given]
    if len(given) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"{names} exclude each other")
    return cast("Start", given[0]) if given else "new"


@batchwright.command()
@click.argument("output")
@click.option("--row", type=int, help="Show this row in full, token by token.")
@click.option("--limit", type=int, default=5, show_default=True, help="Rows to list.")
def show(output: str, row: int | None, limit: int) -> None:
    """Shows what is in OUTPUT: counts, lengths and some rows, or one row in full."""
    from runner.show import show_output, show_row

    if row is None:
        show_output(output, limit)
    else:
        show_row(output, row)


@batchwright.command()
@click.argument("output")
@click.option(
    "--rerun-sample",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Also answer N rows again and compare.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def verify(output: str, rerun_sample: int, as_json: bool) -> int:
    """Proves that OUTPUT is whole and as it was written.

    Every row once and in order, checksums, and columns that agree with each other. Exit code 1 if
    anything is wrong.
    """
    from runner.verify import show_verdict, verify_output

    verdict = verify_output(output, rerun_sample)
    show_verdict(verdict, as_json=as_json)
    return _DIFFERENT if verdict.problems else 0


@batchwright.command()
@click.argument("a")
@click.argument("b")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Rows with other tokens to list.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what differs as JSON.")
def diff(a: str, b: str, limit: int, as_json: bool) -> int:
    """Compares the rows of two outputs, A and B.

    Exit code 1 if any value of any row differs.
    """
    from runner.diff import diff_outputs, show_comparison

    comparison, same_parts = diff_outputs(a, b)
    show_comparison(comparison, same_parts=same_parts, limit=limit, as_json=as_json)
    return 0 if comparison.is_same else _DIFFERENT


def _one_of(ctx: click.Context, name: str, argument: str | None) -> str:
    """INPUT or OUTPUT, from the argument, else the flag, else the configuration file."""
    option_name = PLACES[name]
    option: str | None = ctx.params[option_name]
    if ctx.get_parameter_source(option_name) is not ParameterSource.COMMANDLINE:
        option = None if argument is not None else option
    if (argument is None) == (option is None):
        raise click.UsageError(f"give {name.upper()} once, as an argument or as a flag")
    return argument or option or ""
