"""The story of a run: check, plan, claim, connect, run, account for every row."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cluster.placement import Placement, Seats, settle_seats
from cluster.session import connect
from jobs.claim import Claim, claim_output
from jobs.errors import InputError, ModelError, OutputError, StoppedError, WorkerError
from jobs.folder import (
    check_parts,
    has_job,
    is_finished,
    mark_success,
    mark_unfinished,
    sweep_drafts,
)
from jobs.job import Job
from jobs.metrics import measure
from jobs.output import Start, check_output, clear_output
from jobs.plan import Plan, Shard
from jobs.records import find_finished
from jobs.report import Counts, ShardReport
from jobs.stop import Stop
from jobs.tolerance import Tolerance
from runner.error_budget import ErrorBudget, say_codes
from runner.laps import Laps
from runner.manifest import Intent, describe_job, refuse_other_job, write_intent, write_manifest
from runner.plan import make_plan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Started:
    """The first thing that a run yields: what is going to happen."""

    num_rows: int
    "To be answered by this run."
    num_shards: int
    num_kept: int
    "Shards that an earlier run has finished."
    num_workers: int
    where: str
    "The machine or the cluster."
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last thing that a run yields: what has come of it."""

    counts: Counts
    "Of all shards."
    seconds: float
    "Wall clock of this run, from the start of Ray to the last part."
    num_tokens: int
    "New ones, or scored ones with what precedes them; of this run alone."
    num_kept: int
    "Rows that an earlier run has answered."
    stages: Mapping[str, float]
    "Wall clock of what this run did, in order: imports, plan, ray, model, rows, close."
    metrics: Mapping[str, float]
    "Of a job that scores: perplexity and the like."


def run_job(
    job: Job,
    placement: Placement,
    tolerance: Tolerance | None = None,
    *,
    start: Start = "new",
    stop: Stop | None = None,
    begun: float | None = None,
) -> Iterator[Started | ShardReport | Finished]:
    """Runs a job and yields its reports as shards finish.

    start: what becomes of an output that is there. stop: asked for, it ends the run in order.
    begun: when the command was, by time.perf_counter().

    Raises JobError: before anything is started or written for all that can be known by then.
    StoppedError if it was stopped; what is finished is kept, and can be resumed.
    """
    laps, tolerance, stop = Laps(begun), tolerance or Tolerance(), stop or Stop()
    check_output(job.output, start)
    plan = make_plan(job)
    intent = describe_job(plan)
    with claim_output(plan.job.output) as claim:
        if claim.dead_owner is not None:
            logger.warning("Taken over from %s, which is gone.", claim.dead_owner)
        done = _find_finished(plan, intent, start)
        retried = {s for s, report in done.items() if start == "retry_failed" and report.retryable}
        todo = [shard for shard in plan.shards if shard not in done or shard in retried]
        kept = [report for shard, report in done.items() if shard not in retried]
        errors, reported = ErrorBudget(plan, tolerance, kept), set[Shard]()
        laps.end("plan")
        if not todo:
            yield _account(plan, claim, None, done, kept, laps)
            return
        with stop.watched(), connect(placement) as resources:
            stop.check()
            laps.end("ray")
            # Ray reads its environment, which connect() has set, when it is imported.
            from cluster.pool import hire_workers

            seats = settle_seats(
                placement,
                resources,
                device=plan.device,
                threads=plan.job.model.threads,
                num_shards=len(todo),
            )
            with hire_workers(
                plan, seats, run_id=claim.run_id, tolerance=tolerance, stop=stop
            ) as pool:
                # Only now: what was here is kept until the model has been opened.
                claim.check()
                _open_output(plan, intent, start)
                laps.end("model")
                yield Started(
                    num_rows=sum(shard.num_rows for shard in todo),
                    num_shards=len(todo),
                    num_kept=len(kept),
                    num_workers=seats.num_workers,
                    where="this machine" if placement.address is None else placement.address,
                    notes=plan.notes,
                )
                try:
                    for report in pool.run_shards(todo, retried=retried):
                        done[report.shard] = report
                        reported.add(report.shard)
                        yield report
                        errors.add(report)
                except (InputError, ModelError) as error:  # What was right at the start is not now.
                    raise WorkerError(str(error)) from error
                laps.end("rows")
        laps.end("close")
        left = len(todo) - len(reported)
        if left:
            flag = "--retry-failed" if start == "retry_failed" else "--resume"
            raise StoppedError(
                f"stopped: {len(plan.shards) - left} of {len(plan.shards)} shards are finished. Go "
                f"on with {flag}."
            )
        yield _account(plan, claim, seats, done, kept, laps)


def _find_finished(plan: Plan, intent: Intent, start: Start) -> dict[Shard, ShardReport]:
    """Shards whose parts are kept. Raises RefusedError if they are another job's."""
    folder = plan.job.output
    check_output(folder, start, is_owned=True)  # Another run may have been here since.
    if start in ("new", "overwrite") or not has_job(folder):
        return {}
    refuse_other_job(folder, intent)
    return {report.shard: report for report in find_finished(plan)}


def _open_output(plan: Plan, intent: Intent, start: Start) -> None:
    folder = plan.job.output
    if start in ("new", "overwrite") or not has_job(folder):
        clear_output(folder)
        write_intent(folder, intent)
    else:
        mark_unfinished(folder)


def _account(
    plan: Plan,
    claim: Claim,
    seats: Seats | None,
    done: Mapping[Shard, ShardReport],
    kept: Sequence[ShardReport],
    laps: Laps,
) -> Finished:
    """Makes sure that every row is there, and marks the folder as whole."""
    folder, reports = plan.job.output, [done[shard] for shard in plan.shards]
    seconds = sum(laps.seconds.get(stage, 0.0) for stage in ("ray", "model", "rows", "close"))
    counts = sum((report.counts for report in reports), Counts())
    assert counts.rows == plan.num_rows, f"{counts.rows} rows came back of {plan.num_rows}"
    if not is_finished(folder):
        claim.check()
        sweep_drafts(folder)
        check_parts(folder, [report.part.name for report in reports])
        _check_records(plan, reports)
        write_manifest(plan, seats, reports, seconds, laps.seconds)
        if counts.rows and counts.failed_rows == counts.rows:
            raise WorkerError(
                f"{folder}: not one of {counts.rows} rows was answered: {say_codes(counts)}. Look "
                "at them with: batchwright show"
            )
        mark_success(folder)
    old = sum((report.counts for report in kept), Counts())
    num_tokens, figures = counts.tokens - old.tokens, measure(plan.kind, counts)
    return Finished(counts, seconds, num_tokens, old.rows, laps.seconds, figures)


def _check_records(plan: Plan, reports: Sequence[ShardReport]) -> None:
    """Raises OutputError if a worker that was thought lost has written a part after all."""
    found = {record.shard: record.part for record in find_finished(plan)}
    for report in reports:
        if found.get(report.shard) != report.part:
            raise OutputError(
                f"{plan.job.output}: {report.part.name} is not what its worker reported. Delete it "
                "and go on with --resume."
            )
