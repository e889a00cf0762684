"""The folder's JSON files: what was asked, what it was settled to be, and what came of it."""

import dataclasses
import hashlib
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from cluster.placement import Seats
from jobs.output import JOB, MANIFEST, PLAN, write_json
from jobs.plan import Plan
from jobs.report import Counts, Part

_PACKAGES = ("batchwright", "torch", "transformers", "tokenizers", "pyarrow", "numpy", "ray")


def write_intent(plan: Plan) -> None:
    """Writes _job.json and _plan.json, before any row runs."""
    write_json(plan.job.output, JOB, {"asked": dataclasses.asdict(plan.job), **_settled(plan)})
    write_json(
        plan.job.output,
        PLAN,
        {
            "num_rows": plan.num_rows,
            "rows_per_shard": plan.rows_per_shard,
            "shards": [[shard.start, shard.stop] for shard in plan.shards],
            "files": [dataclasses.asdict(file) for file in plan.source.files],
            "columns": {field.name: str(field.type) for field in plan.source.schema},
        },
    )


def write_manifest(
    plan: Plan, seats: Seats, counts: Counts, parts: Sequence[Part], seconds: float
) -> None:
    """Writes _manifest.json: everything that differs from run to run stands here, not in parts."""
    write_json(
        plan.job.output,
        MANIFEST,
        {
            "counts": counts.record(),
            "seconds": seconds,
            "parts": [dataclasses.asdict(part) for part in parts],
            "model_files": {path: _hash(path) for path in plan.facts.files},
            "placement": dataclasses.asdict(seats) | {"device": plan.device},
            "machine": {"system": platform.platform(), "processor": _processor()},
            "versions": {"python": platform.python_version()} | _versions(),
            "notes": list(plan.notes),
        },
    )


def _settled(plan: Plan) -> dict[str, object]:
    sampling = dataclasses.asdict(plan.sampling)
    sampling["stop_token_ids"] = sorted(plan.sampling.stop_token_ids)
    return {
        "sampling": sampling,
        "sampling_origins": plan.origins,
        "eos_token_ids": list(plan.facts.eos_token_ids),
        "architecture": plan.facts.architecture,
        "vocab_size": plan.facts.vocab_size,
        "max_length": plan.max_length,
        "kind": plan.kind,
        "prompt_column": plan.prompt_column,
        "kept_columns": list(plan.kept_columns),
        "rows_per_shard": plan.rows_per_shard,
        "device": plan.device,
        "dtype": plan.dtype,
    }


def _hash(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions
