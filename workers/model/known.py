"""Facts of models that were looked at before. They follow from files, so files are asked first.

Looking takes transformers, which takes seconds to import; a model that has not changed needs none.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import cached_assets_path

from jobs.model import ModelFacts, ModelRef
from jobs.sampling import SamplingDefaults
from workers.model.folder import (
    PICKLES,
    find_model,
    find_tokenizer,
    revision_of,
    side_files,
    weight_files,
)

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub")
_MOST_HEADER_BYTES = 100 * 2**20
"Of a safetensors file: the format's own limit."


def read_facts(model: ModelRef) -> ModelFacts:
    """What the model's files say, without reading weights. See workers.model.facts.

    Only what was accepted is kept, by all that decides it: names and bytes of the model's files,
    of weights their headers and sizes, the libraries' versions, and our own code.
    """
    if model.trust_remote_code or model.allow_pickle:  # Code may say anything.
        return _look(model)
    folder = find_model(model)
    tokenizer = find_tokenizer(model, folder)
    if not weight_files(folder):
        return _look(model)
    try:
        kept = cached_assets_path("batchwright", namespace="facts") / _key(folder, tokenizer)
        facts = _from_json(kept.read_text("utf-8"))
    except (OSError, ValueError, KeyError, TypeError):  # None yet, or one that was cut off.
        facts = _look(model)
        _keep(facts, folder, tokenizer)
    files = (*weight_files(folder), *side_files(model, folder))
    return dataclasses.replace(
        facts, revision=revision_of(model, folder), files=tuple(map(str, files))
    )


def _look(model: ModelRef) -> ModelFacts:
    from workers.model import facts

    return facts.read_facts(model)


def _keep(facts: ModelFacts, folder: Path, tokenizer: Path) -> None:
    """A cache that cannot be written costs time and nothing else."""
    try:
        kept = cached_assets_path("batchwright", namespace="facts") / _key(folder, tokenizer)
        draft = kept.with_name(f".{kept.name}.{os.getpid()}")
        draft.write_text(json.dumps(dataclasses.asdict(facts)), "utf-8")
        draft.replace(kept)
    except OSError:
        return


def _from_json(text: str) -> ModelFacts:
    record = json.loads(text)
    before, after = record["added_token_ids"]
    return ModelFacts(
        **record
        | {
            "eos_token_ids": tuple(record["eos_token_ids"]),
            "defaults": SamplingDefaults(**record["defaults"]),
            "added_token_ids": (tuple(before), tuple(after)),
            "files": (),
            "notes": tuple(record["notes"]),
        }
    )


def _key(folder: Path, tokenizer: Path) -> str:
    digest = hashlib.sha256()
    for name in _PACKAGES:
        digest.update(f"{name} {version(name)}\n".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    for place in (folder, tokenizer):
        for line in _describe(place):
            digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def _describe(folder: Path) -> Iterator[str]:
    yield "a folder"
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        if any(path.match(pattern) for pattern in PICKLES):
            yield repr((path.name, "is not read"))
            continue
        with path.open("rb") as file:
            if path.suffix == ".safetensors":
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                head = file.read(min(length, _MOST_HEADER_BYTES))
                yield repr((path.name, size, length, hashlib.sha256(head).hexdigest()))
            else:
                yield repr((path.name, hashlib.file_digest(file, "sha256").hexdigest()))
