"""GGUF files, converted once to a folder of float32 weights that opens in a second."""

import hashlib
import io
import json
import logging
import os
import shutil
import struct
from contextlib import redirect_stderr
from pathlib import Path

from huggingface_hub import cached_assets_path

from jobs.errors import ModelError

logger = logging.getLogger(__name__)

_UNREADABLE = (OSError, ValueError, LookupError, TypeError, ImportError, RuntimeError, struct.error)
"What a parser may stumble over in a file that is damaged or no model."


def convert_gguf(path: Path) -> Path:
    """A folder with the file's weights as float32, made once and kept in the user's cache.

    transformers takes half a minute to read GGUF; the folder opens in a second, and workers of a
    machine share its pages.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        cache = cached_assets_path("batchwright", namespace="gguf")
    except OSError as error:
        raise ModelError(f"there is no place to keep a converted model: {error}") from error
    folder = cache / f"{digest}-float32"
    if folder.exists():
        return folder
    logger.info("converting %s, once for all later runs; it takes half a minute", path.name)
    draft = cache / f".{digest}.{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        _write_converted(path, draft)
        draft.rename(folder)
    except _UNREADABLE as error:
        if not folder.exists():  # Else another process was first, with the same outcome.
            raise ModelError(f"{path}: cannot be read as a GGUF model: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _write_converted(path: Path, folder: Path) -> None:
    # Only here: they take seconds to import, and most files are converted already.
    from safetensors.torch import save_model
    from transformers import AutoTokenizer

    from workers.model.loading import read_model

    with redirect_stderr(io.StringIO()):  # Its bar knows of no switch.
        model = read_model(path.parent, dtype="float32", gguf_file=path.name)
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    # save_pretrained refuses a model that came from GGUF: these weights are no longer quantised.
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    model.generation_config.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.save_pretrained(folder)
