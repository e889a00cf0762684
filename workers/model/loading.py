"""Loading weights and tokenizers from a local folder."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from jobs.errors import ModelError
from jobs.model import ModelRef
from workers.model.folder import PICKLES, weight_files


def load_model(model: ModelRef, folder: Path, *, device: str, dtype: str) -> PreTrainedModel:
    """The model with its weights. On a CPU those that are stored as dtype are mapped, not read.

    device: cpu, cuda, or meta, which looks at names and sizes of weights alone.
    Raises ModelError if the weights do not fit the config.
    """
    weights = find_weights(folder, allow_pickle=model.allow_pickle)
    settings = {} if device == "cpu" else {"device_map": device}
    try:
        loaded = read_model(
            folder,
            dtype=dtype,
            use_safetensors=weights[0].suffix == ".safetensors",
            trust_remote_code=model.trust_remote_code,
            **settings,
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelError(f"{model.path}: the model cannot be loaded: {error}") from error
    loaded.train(False)
    return loaded


def read_model(folder: Path, *, dtype: str, **settings: str | bool) -> PreTrainedModel:
    """transformers' own loading, but quiet, and with nothing made up.

    Raises ValueError if weights are missing or of another size, where transformers would go on with
    random ones.
    """
    with quietly():
        loaded, report = cast(
            "tuple[PreTrainedModel, dict[str, list[object]]]",
            AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=getattr(torch, dtype),
                attn_implementation="eager",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **settings,
            ),
        )
    name = type(loaded).__name__
    for key, fault in (
        ("missing_keys", f"it lacks weights that {name} needs"),
        ("mismatched_keys", f"config.json asks for weights of other sizes for {name}"),
    ):
        if report[key]:
            names = sorted(str(k[0] if isinstance(k, tuple) else k) for k in report[key])
            raise ValueError(f"{fault}: {', '.join(names[:3])}{' and more' * (len(names) > 3)}")
    return loaded


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder. Raises ModelError if there is none."""
    try:
        with quietly():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
    return tokenizer


@contextmanager
def quietly() -> Iterator[None]:
    """Keeps transformers from drawing bars and tables: what matters of them is raised."""
    verbosity, has_bars = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def find_device(device: str) -> str:
    """cpu or cuda. Raises ModelError if a GPU is asked for and there is none."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("device cuda was asked for, but torch sees no GPU here. Use --device cpu.")
    return device


def find_weights(folder: Path, *, allow_pickle: bool) -> list[Path]:
    """Files with the weights, safetensors before others. Raises ModelError if there are none."""
    weights = weight_files(folder)
    for path in weights:
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: damaged weights: {error}") from error
    pickles = [path for pattern in PICKLES for path in sorted(folder.glob(pattern))]
    if weights or (pickles and allow_pickle):
        return weights or pickles
    if pickles:
        raise ModelError(
            f"{pickles[0]}: pickled weights can run any code while they are read. Convert them to "
            "safetensors, or pass --allow-pickle if you trust where they come from."
        )
    raise ModelError(f"{folder}: no weights here: no file ends in .safetensors.")
