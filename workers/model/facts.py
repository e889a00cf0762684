"""What a model's files say of it, read without its weights."""

import json
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from jobs.errors import ModelError
from jobs.model import ModelFacts, ModelRef
from jobs.sampling import SamplingDefaults
from workers.model.folder import find_model, find_tokenizer, revision_of, side_files
from workers.model.loading import find_weights, load_model, load_tokenizer, quietly

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_BOUNDED_ROPE = {"dynamic", "longrope"}
"Kinds of rotary embedding whose angles depend on the longest row of a pass, beyond a length."


def read_facts(model: ModelRef) -> ModelFacts:
    """What the model's files say, without reading weights.

    Raises ModelError if the model cannot be found or loaded, or is none that continues text.
    """
    folder = find_model(model)
    weights = find_weights(folder, allow_pickle=model.allow_pickle)
    config = _read_config(folder, model)
    architecture = _check_architecture(folder, config)
    check_layers(config, architecture)
    load_model(model, folder, device="meta", dtype="float32")  # Names and sizes, in a moment.
    text_config = config.get_text_config()
    generation = _read_json(folder / "generation_config.json")
    max_length, notes = _max_length(folder, text_config)
    has_tokenizer = model.tokenizer is not None or _has_tokenizer(folder)
    firsts = [text_config.bos_token_id, text_config.eos_token_id]
    eos = _ids(text_config.eos_token_id) | _ids(config.eos_token_id)
    eos |= _ids(generation.get("eos_token_id"))
    added: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    has_chat_template = False
    if has_tokenizer:
        tokenizer = load_tokenizer(
            find_tokenizer(model, folder), trust_remote_code=model.trust_remote_code
        )
        eos |= _ids(tokenizer.eos_token_id)
        added = _added_token_ids(tokenizer)
        has_chat_template = tokenizer.chat_template is not None
        firsts = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    unknown = sorted(token_id for token_id in eos if not 0 <= token_id < text_config.vocab_size)
    if unknown:
        notes.append(f"EOS {unknown} is no word of the model, so that it cannot end a row.")
    defaults, greedy_notes = _sampling_defaults(generation)
    return ModelFacts(
        architecture=architecture,
        vocab_size=text_config.vocab_size,
        max_length=max_length,
        eos_token_ids=tuple(sorted(eos - set(unknown))),
        defaults=defaults,
        has_tokenizer=has_tokenizer,
        dtype=str(config.dtype or torch.float32).removeprefix("torch."),
        added_token_ids=added,
        has_chat_template=has_chat_template,
        first_token_id=next((i for i in firsts if i in range(text_config.vocab_size)), None),
        revision=revision_of(model, folder),
        files=tuple(str(path) for path in [*weights, *side_files(model, folder)]),
        notes=(*notes, *greedy_notes),
    )


def check_layers(config: PreTrainedConfig, name: str) -> None:
    """Raises ModelError if the config names layers that mix tokens in ways not covered here."""
    text_config = config.get_text_config()
    others = set(getattr(text_config, "layer_types", None) or ()) - _LAYER_TYPES
    if getattr(text_config, "attention_chunk_size", None) or others:
        kinds = ", ".join(sorted(others)) or "chunked attention"
        raise ModelError(f"{name} cannot be run in ragged batches: it has layers of {kinds}.")


def _read_config(folder: Path, model: ModelRef) -> PreTrainedConfig:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{model.path}: no model here: the folder has no config.json.")
    try:
        with quietly():
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                folder, trust_remote_code=model.trust_remote_code
            )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{model.path}: config.json cannot be read: {error}") from error
    return config


def _check_architecture(folder: Path, config: PreTrainedConfig) -> str:
    """The architecture's name. What only the weights can tell is proved when they are loaded."""
    names = config.architectures or [type(config).__name__]
    name = str(names[0])
    if config.is_encoder_decoder or type(config) not in AutoModelForCausalLM._model_mapping:
        if getattr(config, "auto_map", None):
            return name  # The model brings its own code, and was trusted to.
        raise ModelError(f"{folder}: {name} is no decoder-only language model.")
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelError(
            f"{folder}: {name} cannot be run in ragged batches: its attention cannot be replaced. "
            "Use another engine."
        )
    return name


def _max_length(folder: Path, config: PreTrainedConfig) -> tuple[int, list[str]]:
    longest = getattr(config, "max_position_embeddings", None)
    if not longest:
        raise ModelError(f"{folder}: config.json does not say how long a row may be.")
    rope = getattr(config, "rope_parameters", None) or {}
    # Models with several kinds of layers keep one set of parameters for each kind.
    parameters = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for kind in parameters:
        if kind.get("rope_type") not in _BOUNDED_ROPE:
            continue
        original = kind.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", longest
        )
        if original < longest:
            note = (
                f"Rows are limited to {original} tokens: beyond, {kind['rope_type']} rotary "
                "embeddings would let the rows of a batch change each other."
            )
            return int(original), [note]
    return int(longest), []


def _sampling_defaults(generation: dict[str, object]) -> tuple[SamplingDefaults, list[str]]:
    def number(name: str) -> float | None:
        value = generation.get(name)
        return value if isinstance(value, int | float) else None

    def count(name: str) -> int | None:
        value = number(name)
        return None if value is None else int(value)

    defaults = SamplingDefaults(
        min_new_tokens=count("min_new_tokens"),
        temperature=number("temperature"),
        top_k=count("top_k"),
        top_p=number("top_p"),
        repetition_penalty=number("repetition_penalty"),
    )
    if generation.get("do_sample") is not False:
        return defaults, []
    greedy = SamplingDefaults(
        defaults.min_new_tokens, 0.0, 1, defaults.top_p, defaults.repetition_penalty
    )
    note = (
        "The model's generation config says do_sample: false, so temperature is 0 and top_k is 1 "
        "unless given; to sample, give both."
    )
    return greedy, [note]


def _has_tokenizer(folder: Path) -> bool:
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return any((folder / name).is_file() for name in names)


def _ids(value: object) -> set[int]:
    """The token ids in a config's field: one, several or none."""
    if isinstance(value, int):
        return {value}
    return {item for item in value if isinstance(item, int)} if isinstance(value, list) else set()


def _added_token_ids(
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer puts before and after a text by itself."""
    whole = tokenizer("a", verbose=False)["input_ids"]
    bare = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start]), tuple(whole[start + len(bare) :])
    return (), ()


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        content: dict[str, object] = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    return content
