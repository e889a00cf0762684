"""What decides the bytes of a job's parts, by name. Jobs that differ in any of it do not mix."""

import dataclasses
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version

from jobs.files import InputFile
from jobs.plan import Plan

PACKAGES = ("batchwright", "numpy", "pyarrow")
"Whose versions decide what every engine's parts look like."
_MOST_SHOWN = 60
"Characters of a value in a sentence."
_ABSENT = object()


def settle_identity(plan: Plan, packages: Sequence[str]) -> dict[str, object]:
    """Everything that can change a byte but the input files, with values that JSON can hold.

    Reads the model's files whole, for their hashes. packages: whose versions the engine depends on.
    Raises OSError if a file of the model cannot be read.
    """
    job, model, facts = plan.job, plan.job.model, plan.facts
    return {
        "engine": model.engine,
        # A model of files is what its files say, wherever they lie.
        **({} if facts.files else {"model": model.path}),
        **hash_files(facts.files),
        "architecture": facts.architecture,
        "eos_token_ids": list(facts.eos_token_ids),
        "vocab_size": facts.vocab_size,
        "max_model_len": plan.max_length,
        "dtype": plan.dtype,
        "device": plan.device,
        "kernels": plan.kernels,
        "compile": model.compile,
        "threads_per_worker": model.threads,
        "trust_remote_code": model.trust_remote_code,
        "kind": plan.kind,
        **plan.prompt_columns,
        "add_special_tokens": job.add_special_tokens,
        "truncation": job.truncation,
        **plan.sampling.record(),
        **({} if job.scoring is None else {"pmi": job.scoring.pmi}),
        **({} if job.scoring is None else {"token_logprobs": job.scoring.token_logprobs}),
        "seed": job.sampling.seed,
        "logprobs": job.logprobs,
        "prompt_logprobs": job.prompt_logprobs,
        "output_logits": job.output_logits,
        "logits_dtype": job.logits_dtype,
        "output_format": job.output_format,
        "output_prefix": job.output_prefix,
        "kept_columns": list(plan.kept_columns),
        "column_types": {field.name: str(field.type) for field in plan.source.schema},
        "rows": plan.num_rows,
        "rows_per_batch": job.packing.rows_per_batch,
        "schedule": job.packing.schedule,
        "max_batch_tokens": job.packing.max_batch_tokens,
        "rows_per_shard": plan.rows_per_shard,
        "logits_budget": job.packing.logits_budget_bytes,
        **{f"version of {name}": value for name, value in versions((*PACKAGES, *packages)).items()},
    }


def identify_files(files: Iterable[Mapping[str, object]]) -> dict[str, object]:
    """The input files by name, each with what tells whether it is still the same."""
    described = [dict(file) for file in files]
    paths = [str(file.pop("path")) for file in described]
    folder = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    names = [os.path.relpath(path, folder) for path in paths]
    return {f"input file {name}": file for name, file in zip(names, described, strict=True)}


def describe_files(files: Iterable[InputFile]) -> list[dict[str, object]]:
    """The input files as JSON can hold them."""
    return [dataclasses.asdict(file) for file in files]


def find_differences(then: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """In sentences without an end: each name that differs, with both values."""
    different = []
    for name in {**then, **now}:
        old, new = then.get(name, _ABSENT), now.get(name, _ABSENT)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            different += [f"{name}: {said}" for said in find_differences(old, new)]
        else:
            different.append("{} was {}, is now {}".format(name, *_show(old, new)))
    return different


def hash_identity(identity: Mapping[str, object]) -> str:
    """One word for all of it."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The installed version of each package."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def hash_files(paths: Sequence[str]) -> dict[str, object]:
    """SHA-256 of each file, by its name; a second one of the same name is numbered."""
    with ThreadPoolExecutor(max_workers=8) as readers:
        hashes = list(readers.map(_hash, paths))
    named: dict[str, object] = {}
    seen: Counter[str] = Counter()
    for path, value in zip(paths, hashes, strict=True):
        name = os.path.basename(path)
        seen[name] += 1
        number = f" ({seen[name]})" if seen[name] > 1 else ""
        named[f"model file {name}{number}"] = value
    return named


def _hash(path: str) -> str:
    """The file's SHA-256. The hub's cache calls large files by it, so that it need not be made."""
    folder, name = os.path.split(os.path.realpath(path))
    if os.path.basename(folder) == "blobs" and re.fullmatch("[0-9a-f]{64}", name):
        return name
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _show(*values: object) -> list[str]:
    """Values as text. Long ones are cut to where they differ."""
    texts = ["not there" if value is _ABSENT else json.dumps(value) for value in values]
    if max(map(len, texts)) <= _MOST_SHOWN:
        return texts
    pairs = enumerate(zip(*texts, strict=False))
    same = next((i for i, characters in pairs if len({*characters}) > 1), min(map(len, texts)))
    start = max(0, same - _MOST_SHOWN // 2)
    stop = start + _MOST_SHOWN
    return ["…" * (start > 0) + text[start:stop] + "…" * (len(text) > stop) for text in texts]
