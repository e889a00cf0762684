"""Running jobs in tests: the whole way but for Ray, and the command as a stranger would call it."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.folder import list_parts
from jobs.job import Job, Packing
from jobs.model import ModelRef
from jobs.parts import read_part
from jobs.plan import Plan
from jobs.report import Counts
from jobs.sampling import Sampling
from runner.manifest import describe_job, write_intent
from runner.plan import make_plan
from workers.worker import Worker

BATCHWRIGHT = os.path.join(os.path.dirname(sys.executable), "batchwright")


def echo_job(source: Path, output: Path, **settings: object) -> Job:
    """A job on the echo engine; settings go to the dataclass that has them."""
    return make_job(source, output, ModelRef("echo", engine="echo"), **settings)


def make_job(source: Path, output: Path, model: ModelRef, **settings: object) -> Job:
    """A job of few greedy tokens; settings go to the dataclass that has them."""
    sampling = {"max_new_tokens": 4, "temperature": 0.0}
    packing: dict[str, object] = {"rows_per_batch": 4}
    rest: dict[str, object] = {}
    for name, value in settings.items():
        if name in Sampling.__dataclass_fields__:
            sampling[name] = value
        elif name in Packing.__dataclass_fields__:
            packing[name] = value
        else:
            rest[name] = value
    return Job(
        input=str(source),
        output=str(output),
        model=model,
        sampling=Sampling(**sampling),
        packing=Packing(**packing),
        **rest,
    )


def run_here(job: Job) -> tuple[pa.Table, Counts]:
    """Runs a job without Ray, in this process, and returns its rows and counts."""
    counts = run_plan(prepared(job))
    return read_rows(job.output), counts


def prepared(job: Job) -> Plan:
    """A job's plan, its folder made and its intent written."""
    plan = make_plan(job)
    os.makedirs(plan.job.output)
    write_intent(plan.job.output, describe_job(plan))
    return plan


def open_worker(plan: Plan) -> Worker:
    """A worker of a plan, in this process."""
    worker = Worker(plan)
    worker.open()
    return worker


def run_plan(plan: Plan) -> Counts:
    """Runs every shard of a plan in this process."""
    worker = open_worker(plan)
    return sum((worker.run_shard(shard).counts for shard in plan.shards), Counts())


def read_rows(folder: str | Path) -> pa.Table:
    """All rows of an output, in part order."""
    return pa.concat_tables([read_part(path) for path in list_parts(str(folder))])


def write_prompts(path: Path, prompts: list[str | None], **columns: list[object]) -> Path:
    """A Parquet file with an id, a prompt, and what else is given."""
    ids = pa.array(range(len(prompts)), pa.int64())
    table = {"id": ids, "prompt": pa.array(prompts, pa.string()), **columns}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table), path)
    return path


def batchwright(
    *arguments: object, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own."""
    return subprocess.run(
        [BATCHWRIGHT, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def worker_pids(driver: int) -> list[int]:
    """Processes of the workers that a driver has started, and of nobody else's."""
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit()
        and _read(entry / "cmdline").startswith("ray::Worker")
        and driver in _ancestors(int(entry.name))
    ]


def _ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        found.append(pid)
        # The name stands in parentheses and may hold blanks; the parent is the second word after.
        fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
        pid = int(fields[1]) if len(fields) > 1 else 0
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # The process has ended meanwhile.
        return ""
