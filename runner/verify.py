"""Proving an output: every planned row once, in order, whole, and repeatable."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console

from jobs.checks import Expected, check_part
from jobs.errors import JobError, OutputError
from jobs.folder import MANIFEST, SUCCESS, is_finished, list_parts, part_name, read_json
from jobs.identity import find_differences
from jobs.metrics import measure
from jobs.plan import Shard
from jobs.records import read_record
from jobs.repeat import Repeat
from jobs.report import Counts, Part, ShardReport
from jobs.sampling import RowSampling
from jobs.storage import absolute_folder, join, name_of
from runner.manifest import Intent, describe_job, read_asked, read_intent
from runner.plan import make_plan
from runner.words import counted, finite

_COUNTS = (
    "rows", "failed", "prompt_tokens", "new_tokens", "scored_tokens", "scored_bytes",
    "scored_words", "loglikelihood", "greedy", "labelled", "right",
)  # fmt: skip
_MOST_SHOWN = 20
_MOST_DIFFERENCE = 1e-3
"Log-probabilities that are further apart, in nats, are another model's or another input's."


@dataclass(slots=True)
class Verdict:
    """What was looked at, and what is wrong with it."""

    folder: str
    rows: int = 0
    parts: int = 0
    problems: list[str] = field(default_factory=list)
    rows_repeated: int = 0
    "Rows that were answered once more."
    rows_same: int = 0
    "Those of them that are the same to the last bit."
    logprob_difference: float = 0.0
    "The greatest of all rows that were answered once more, in nats."


def verify_output(folder: str, rerun_sample: int) -> Verdict:
    """Looks at everything in the folder, and answers some of its rows again.

    Raises OutputError if it holds no job at all.
    """
    verdict, intent = Verdict(folder), read_intent(folder)
    file_format = intent.job["identity"]["output_format"]
    shards = [Shard(i, start, stop) for i, (start, stop) in enumerate(intent.plan["shards"])]
    names = {shard: part_name(shard.index, file_format) for shard in shards}
    present = {name_of(path) for path in list_parts(folder)}
    there = [shard for shard in shards if names[shard] in present]
    records = {shard: record for shard in there if (record := read_record(folder, shard))}
    verdict.parts = len(present)
    verdict.rows = sum(shard.num_rows for shard in there)
    if len(there) < len(shards):
        first = next(names[shard] for shard in shards if shard not in there)
        verdict.problems.append(
            f"{len(shards) - len(there)} of {len(shards)} parts are missing, the first is {first}. "
            "Go on with --resume."
        )
    verdict.problems += [
        f"{name}: is a part of no shard that was planned."
        for name in sorted(present - set(names.values()))
    ]
    verdict.problems += [
        f"{names[shard]}: has no record that is its own."
        for shard in there
        if shard not in records or records[shard].shard != shard
    ]
    known = {shard: record for shard, record in records.items() if record.shard == shard}
    verdict.problems += _check_parts(folder, names, known, intent)
    if len(known) == len(shards):
        kind = str(intent.job["identity"]["kind"])
        verdict.problems += _check_account(folder, kind, list(known.values()))
    if rerun_sample and verdict.problems:
        verdict.problems.append("no row was answered again, since the parts are not sound.")
    elif rerun_sample:
        _repeat(verdict, intent, rerun_sample)
    return verdict


def _check_parts(
    folder: str,
    names: Mapping[Shard, str],
    records: Mapping[Shard, ShardReport],
    intent: Intent,
) -> Iterator[str]:
    """Every part against its record, several at a time."""
    identity = intent.job["identity"]
    expected = Expected(
        intent.schema,
        identity["output_prefix"],
        set(identity["kept_columns"]),
        _first_plain_step(identity),
    )

    def check(shard: Shard) -> list[str]:
        path = join(folder, names[shard])
        return list(check_part(path, shard, records[shard], expected))

    with ThreadPoolExecutor(max_workers=4) as readers:
        for problems in readers.map(check, records):
            yield from problems


def _first_plain_step(identity: Mapping[str, Any]) -> int | None:
    """From where on log-probabilities are of the raw logits: penalties and masks change them."""
    sampling = RowSampling.from_record(identity)
    return None if sampling.has_penalties else sampling.min_new_tokens


def _check_account(folder: str, kind: str, records: Sequence[ShardReport]) -> Iterator[str]:
    """The folder's own account of itself: marker, manifest, and numbers that add up."""
    if not is_finished(folder):
        yield f"{SUCCESS} or {MANIFEST} is missing: the job has not ended. Go on with --resume."
        return
    counts = sum((record.counts for record in records), Counts())
    found, metrics = counts.record(), measure(kind, counts)
    try:
        manifest: Any = read_json(folder, MANIFEST)
        said = {name: manifest["counts"][name] for name in _COUNTS}
        said_metrics = manifest["metrics"]
        parts = [Part(**part) for part in manifest["parts"]]
    except (OutputError, LookupError, TypeError) as error:
        yield f"{MANIFEST}: is missing, damaged, or another version's: {error}"
        return
    for name in _COUNTS:
        if said[name] != found[name]:
            yield f"{MANIFEST}: {name} is {said[name]}; the records add up to {found[name]}."
    if said_metrics != {name: finite(value) for name, value in metrics.items()}:
        yield f"{MANIFEST}: metrics are {said_metrics}; the records make {metrics}."
    if parts != [record.part for record in records]:
        yield f"{MANIFEST}: its list of parts is not what their records say."


def _repeat(verdict: Verdict, intent: Intent, num_rows: int) -> None:
    """Answers rows again that lie evenly over the output."""
    from workers.rerun import rerun_rows  # Brings torch with it.

    job = replace(read_asked(verdict.folder), output=absolute_folder(verdict.folder))
    try:
        plan = make_plan(job)
        different = find_differences(intent.identity, describe_job(plan).identity)
        if different:
            shown = "; ".join(different[:_MOST_SHOWN])
            verdict.problems.append(f"rows cannot be answered as they were: {shown}.")
            return
        row_ids = sorted({plan.num_rows * k // num_rows for k in range(num_rows)})
        for repeat in rerun_rows(plan, row_ids if plan.num_rows else []):
            _take(verdict, repeat)
    except JobError as error:
        verdict.problems.append(f"rows cannot be answered again: {error}")


def _take(verdict: Verdict, repeat: Repeat) -> None:
    verdict.rows_repeated += 1
    verdict.rows_same += repeat.is_same
    verdict.logprob_difference = max(verdict.logprob_difference, repeat.logprob_difference)
    if repeat.problem is not None:
        verdict.problems.append(f"row {repeat.row_id}, answered again: {repeat.problem}.")
    elif repeat.logprob_difference > _MOST_DIFFERENCE:
        verdict.problems.append(
            f"row {repeat.row_id}, answered again: a logprob is {repeat.logprob_difference:.2g} "
            "nats away."
        )


def show_verdict(verdict: Verdict, *, as_json: bool) -> None:
    """Prints what was found: words, or one JSON object."""
    if as_json:
        record = {name: getattr(verdict, name) for name in Verdict.__slots__}
        record["logprob_difference"] = finite(verdict.logprob_difference)
        sys.stdout.write(json.dumps(record | {"is_whole": not verdict.problems}) + "\n")
        return
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for problem in verdict.problems[:_MOST_SHOWN]:
        console.print(problem)
    if len(verdict.problems) > _MOST_SHOWN:
        console.print(f"and {len(verdict.problems) - _MOST_SHOWN} more")
    if verdict.rows_repeated:
        console.print(
            f"{counted(verdict.rows_repeated, 'row')} answered again: {verdict.rows_same} the same "
            f"to the last bit, the greatest difference {verdict.logprob_difference:.2g} nats"
        )
    sound = "every row once and in order, as it was written: all is well"
    outcome = counted(len(verdict.problems), "problem") if verdict.problems else sound
    console.print(f"{counted(verdict.rows, 'row')} in {counted(verdict.parts, 'part')}: {outcome}")
