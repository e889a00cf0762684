"""The folder's JSON files: what was asked, what it was settled to be, and what came of it."""

import base64
import dataclasses
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cluster.placement import Seats
from jobs.errors import ModelError, OutputError, RefusedError
from jobs.folder import JOB, MANIFEST, PLAN, read_json, write_json
from jobs.identity import (
    describe_files,
    find_differences,
    hash_identity,
    identify_files,
    settle_identity,
    versions,
)
from jobs.job import Job, Packing
from jobs.metrics import measure
from jobs.model import ModelRef
from jobs.plan import Plan
from jobs.report import Counts, ShardReport
from jobs.sampling import RowSampling, Sampling
from jobs.schema import output_schema
from jobs.scoring import Scoring
from runner.words import finite
from workers.engine import load_engine

_PACKAGES = ("batchwright", "torch", "transformers", "tokenizers", "pyarrow", "numpy", "ray")
_NOT_OURS = (AssertionError, AttributeError, LookupError, TypeError, ValueError, pa.ArrowException)
"What another version's values may raise."
_READ_LATER = (
    "output_format", "output_prefix", "kept_columns",
    *(field.name for field in dataclasses.fields(RowSampling)),
)  # fmt: skip
"Of the identity, by those who look at an output."
_MOST_DIFFERENCES = 8
"Named in one message."


@dataclass(frozen=True, slots=True)
class Intent:
    """What a job is going to do, as its folder says it before any row runs."""

    job: Mapping[str, Any]
    plan: Mapping[str, Any]

    @property
    def schema(self) -> pa.Schema:
        """That of all parts."""
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.plan["schema"])))

    @property
    def identity(self) -> dict[str, object]:
        """Everything that can change a byte, by name."""
        return {**self.job["identity"], **identify_files(self.plan["files"])}


def describe_job(plan: Plan) -> Intent:
    """What _job.json and _plan.json are to say. Reads the model's files for their hashes."""
    packages = load_engine(plan.job.model.engine).capabilities.packages
    try:
        identity = settle_identity(plan, packages)
    except OSError as error:
        raise ModelError(f"{plan.job.model.path}: cannot be read: {error}") from error
    files = describe_files(plan.source.files)
    job = {
        "asked": dataclasses.asdict(plan.job),
        "identity": identity,
        "fingerprint": hash_identity({**identity, **identify_files(files)}),
        "sampling_origins": plan.origins,
    }
    return Intent(
        job,
        {
            "num_rows": plan.num_rows,
            "shards": [[shard.start, shard.stop] for shard in plan.shards],
            "files": files,
            # As Arrow writes it; names and types in words stand in every part.
            "schema": base64.b64encode(output_schema(plan).serialize()).decode(),
        },
    )


def write_intent(folder: str, intent: Intent) -> None:
    """Writes _plan.json and _job.json, before any row runs."""
    write_json(folder, PLAN, intent.plan)
    write_json(folder, JOB, intent.job)  # Last: where it is, the other is.


def read_intent(folder: str) -> Intent:
    """What the folder's job is. Raises OutputError if it is none, or another version's."""
    intent = Intent(read_json(folder, JOB), read_json(folder, PLAN))
    with _of_this_version(folder):
        assert intent.job["asked"] and intent.plan["shards"] and intent.schema
        assert intent.identity.keys() >= set(_READ_LATER)
    return intent


def read_asked(folder: str) -> Job:
    """The job as it was asked for. Raises what read_intent raises."""
    asked = read_intent(folder).job["asked"]
    with _of_this_version(folder):
        return Job(
            **asked
            | {
                "model": ModelRef(**asked["model"]),
                "sampling": Sampling(**_with_tuples(asked["sampling"])),
                "scoring": None if asked["scoring"] is None else Scoring(**asked["scoring"]),
                "packing": Packing(**asked["packing"]),
                "keep": None if asked["keep"] is None else tuple(asked["keep"]),
            }
        )


@contextmanager
def _of_this_version(folder: str) -> Iterator[None]:
    try:
        yield
    except _NOT_OURS as error:
        raise OutputError(
            f"{folder}: {JOB} and {PLAN} are from another version, or damaged: {error!r}. Start "
            "afresh in another folder."
        ) from error


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists alone; frozen fields have tuples."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def refuse_other_job(folder: str, intent: Intent) -> None:
    """Raises RefusedError if the folder holds another job's rows, naming what differs."""
    different = find_differences(read_intent(folder).identity, intent.identity)
    if not different:
        return
    shown = "; ".join(different[:_MOST_DIFFERENCES])
    more = len(different) - _MOST_DIFFERENCES
    raise RefusedError(
        f"{folder}: holds rows of another job, and the two must not mix: {shown}"
        f"{f'; and {more} more' if more > 0 else ''}. Give what was given then, choose a new "
        "folder, or delete this one's rows with --overwrite."
    )


def write_manifest(
    plan: Plan,
    seats: Seats | None,
    reports: Sequence[ShardReport],
    seconds: float,
    stages: Mapping[str, float] | None = None,
) -> None:
    """Writes _manifest.json: everything that differs from run to run stands here, not in parts."""
    counts = sum((report.counts for report in reports), Counts())
    figures = {name: finite(value) for name, value in measure(plan.kind, counts).items()}
    placement = {} if seats is None else dataclasses.asdict(seats)
    write_json(
        plan.job.output,
        MANIFEST,
        {
            "counts": counts.record(),
            "metrics": figures,
            "seconds": seconds,
            "stages": dict(stages or {}),
            "parts": [dataclasses.asdict(report.part) for report in reports],
            "placement": placement | {"device": plan.device},
            "machine": {"system": platform.platform(), "processor": _processor()},
            "versions": {"python": platform.python_version()} | versions(_PACKAGES),
            "notes": list(plan.notes),
        },
    )


def _processor() -> str:
    """The processor's name, since the last bits of a sum depend on what it can do."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.processor()
