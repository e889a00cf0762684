"""The story of a run: check, plan, connect, claim, run, account for every row."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.placement import Placement, settle_seats
from cluster.session import connect
from jobs.errors import InputError, ModelError, WorkerError
from jobs.job import Job
from jobs.output import check_output, check_parts, claim_output, mark_success, sweep_drafts
from jobs.report import Counts, Part, ShardReport
from runner.manifest import write_intent, write_manifest
from runner.plan import make_plan


@dataclass(frozen=True, slots=True)
class Started:
    """The first thing that a run yields: what is going to happen."""

    num_rows: int
    num_shards: int
    num_workers: int
    where: str
    "The machine or the cluster."
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last thing that a run yields: what has come of it."""

    counts: Counts
    seconds: float
    "Wall clock, from the start of Ray to the last part."


def run_job(
    job: Job, placement: Placement, *, overwrite: bool = False
) -> Iterator[Started | ShardReport | Finished]:
    """Runs a job and yields its reports as shards finish.

    Raises JobError: before anything is started or written for all that can be known by then.
    """
    check_output(job.output, overwrite=overwrite)
    plan = make_plan(job)
    job, shards = plan.job, plan.shards
    started = time.perf_counter()
    with connect(placement) as resources:
        # Ray reads its environment, which connect() has set, when it is imported.
        from cluster.pool import hire_workers

        seats = settle_seats(
            placement,
            resources,
            device=plan.device,
            threads=job.model.threads,
            num_shards=len(shards),
        )
        with hire_workers(plan, seats) as pool:
            # Only now: what an earlier job has left is kept until the model has been opened.
            claim_output(job.output, overwrite=overwrite)
            write_intent(plan)
            yield Started(
                num_rows=plan.num_rows,
                num_shards=len(shards),
                num_workers=seats.num_workers,
                where="this machine" if placement.address is None else placement.address,
                notes=plan.notes,
            )
            counts = Counts()
            parts: list[Part] = []
            try:
                for report in pool.run_shards(shards):
                    counts += report.counts
                    parts.append(report.part)
                    yield report
            except (InputError, ModelError) as error:  # What was right at the start no longer is.
                raise WorkerError(str(error)) from error
    assert counts.rows == plan.num_rows, f"{counts.rows} rows came back of {plan.num_rows}"
    seconds = time.perf_counter() - started
    sweep_drafts(job.output)
    check_parts(job.output, [part.name for part in parts])
    write_manifest(plan, seats, counts, sorted(parts, key=lambda part: part.name), seconds)
    mark_success(job.output)
    yield Finished(counts, seconds)
