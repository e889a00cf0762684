"""What a run looks like while it goes on, and its summary: words to stderr, data to stdout."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jobs.errors import WorkerError
from jobs.report import Counts, ShardReport
from runner.run import Finished, Started
from runner.words import counted, finite


def show_run(
    reports: Iterable[Started | ShardReport | Finished],
    output: str,
    *,
    quiet: bool,
    as_json: bool,
) -> Counts:
    """Goes through a run, showing a bar on a terminal and a line a shard elsewhere.

    Returns the counts of the whole run.
    """
    console = Console(stderr=True, highlight=False, quiet=quiet)
    # Ray prints to stdout when it loses a worker; what stands there must be data alone.
    with redirect_stdout(sys.stderr), _display(console) as display:
        for report in reports:
            match report:
                case Started():
                    display.start(report)
                case ShardReport():
                    display.advance(report)
                case Finished():
                    finished = report
                    break
        else:
            raise WorkerError("the run ended before it was finished.")
    Console(stderr=True, highlight=False).print(
        _summary(finished, output), soft_wrap=True, markup=False
    )
    if as_json:
        sys.stdout.write(json.dumps(_record(finished, output)) + "\n")
    return finished.counts


@contextmanager
def _display(console: Console) -> Iterator["_Bar | _Lines"]:
    if not console.is_terminal or console.quiet:
        yield _Lines(console)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows {task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:
        yield _Bar(progress)


class _Bar:
    """A bar that counts rows."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=None, rate="")
        self._tokens = self._errors = 0

    def start(self, started: Started) -> None:
        self._progress.update(
            self._task,
            description=counted(started.num_workers, "worker"),
            total=started.num_rows,
            completed=0,
        )
        for note in started.notes:
            self._progress.console.print(note, soft_wrap=True, markup=False)

    def advance(self, report: ShardReport) -> None:
        self._tokens += report.counts.tokens
        self._errors += report.counts.failed_rows
        elapsed = self._progress.tasks[0].elapsed or 1.0
        self._progress.update(
            self._task,
            advance=report.counts.rows,
            rate=f"{counted(self._errors, 'error')} {self._tokens / elapsed:,.0f} tokens/s",
        )


class _Lines:
    """One line a shard, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_shards = 0
        self._num_done = 0

    def start(self, started: Started) -> None:
        self._num_shards = started.num_shards
        kept = f", {counted(started.num_kept, 'shard')} kept" if started.num_kept else ""
        shards, workers = (
            counted(started.num_shards, "shard"),
            counted(started.num_workers, "worker"),
        )
        work = f"{started.num_rows:,} rows, {shards}, {workers} on {started.where}{kept}"
        for line in (*started.notes, work):
            self._console.print(line, soft_wrap=True, markup=False)

    def advance(self, report: ShardReport) -> None:
        self._num_done += 1
        counts = report.counts
        failed = f", {counted(counts.failed_rows, 'error')}" if counts.failed_rows else ""
        self._console.print(
            f"shard {report.shard.index} ({self._num_done} of {self._num_shards}): "
            f"{counts.rows:,} rows{failed}, {counts.tokens:,} tokens, {report.seconds:.1f} s "
            f"({counts.tokens / report.seconds:,.0f} tokens/s)",
            soft_wrap=True,
            markup=False,
        )


def _summary(finished: Finished, output: str) -> str:
    counts, seconds = finished.counts, finished.seconds
    if not counts.rows:
        return f"nothing to do: there are no rows\noutput in {output}"
    done = "scored" if counts.scored_tokens else "answered"
    lines = [
        f"{counts.rows:,} rows: {counts.rows - counts.failed_rows:,} {done}, "
        f"{counted(counts.failed_rows, 'error')}",
        *(f"  {code}: {number:,}" for code, number in sorted(counts.failed.items())),
    ]
    if not seconds:
        lines.insert(0, "nothing to do: all rows are finished already")
    elif finished.num_kept:
        lines.append(f"{finished.num_kept:,} of the rows were finished already")
    if counts.truncated:
        lines.append(f"{counted(counts.truncated, 'prompt')} cut to fit")
    if counts.out_of_room:
        lines.append(f"{counted(counts.out_of_room, 'answer')} ended early for want of room")
    if counts.halved:
        lines.append(f"{counted(counts.halved, 'shard')} in smaller batches for want of memory")
    new = (
        f"{counts.scored_tokens:,} scored" if counts.scored_tokens else f"{counts.new_tokens:,} new"
    )
    lines.append(
        f"{counts.prompt_tokens:,} prompt tokens, {new} tokens"
        + (f", {seconds:.1f} s ({_rate(finished):,.0f} tokens/s)" if seconds else "")
    )
    lines += [_figure(name, finished.metrics) for name in finished.metrics if name[-6:] != "stderr"]
    return "\n".join([*lines, f"output in {output}"])


def _figure(name: str, metrics: Mapping[str, float]) -> str:
    """A figure of the whole set, with its standard error where it has one."""
    error = metrics.get(f"{name}_stderr")
    said = name.replace("_", " ").replace("pmi", "PMI")
    return f"{said} {metrics[name]:.4g}" + (f" ± {error:.2g}" if error is not None else "")


def _record(finished: Finished, output: str) -> dict[str, object]:
    return {
        "output": output,
        "failed_rows": finished.counts.failed_rows,
        "seconds": finished.seconds,
        "stages": dict(finished.stages),
        "tokens_per_s": _rate(finished),
        "rows_kept": finished.num_kept,
        **finished.counts.record(),
        "metrics": {name: finite(value) for name, value in finished.metrics.items()},
    }


def _rate(finished: Finished) -> float:
    """Tokens a second, of this run alone."""
    return finished.num_tokens / finished.seconds if finished.seconds else 0.0
