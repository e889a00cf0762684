"""From a job to a plan: the input looked at, the model asked, every open value settled."""

import dataclasses
import os
from collections.abc import Mapping, Sequence

from jobs.errors import InputError, SettingError
from jobs.files import RowSource, fixed_folder, scan_input
from jobs.job import Job
from jobs.kinds import KINDS
from jobs.model import DEMO, ModelFacts, check_compile, settle_dtype
from jobs.plan import Plan, bulky_bytes_per_token, settle_rows_per_shard
from jobs.sampling import Origin, RowSampling, check_min_against_max, resolve_sampling
from jobs.schema import output_schema
from jobs.storage import absolute_folder, is_uri
from workers.engine import Capabilities, load_engine, settle_max_length


def make_plan(job: Job) -> Plan:
    """Settles a job against its files and its model. Reads footers and config files only.

    Raises JobError for whatever a user can get wrong about either.
    """
    engine = load_engine(job.model.engine)
    job = _anchored(job, reads_model=engine.capabilities.reads_model)
    source = scan_input(job.input)
    _check_places(job, source)
    kind, prompt_column = _find_prompt_column(job, source)
    kept = _find_kept_columns(job, source)
    _check_capabilities(job, engine.capabilities)
    device = engine.find_device(job.model.device)
    check_compile(job.model, device)
    facts = engine.read_facts(job.model)
    if facts.revision is not None:
        pinned = dataclasses.replace(job.model, revision=facts.revision)
        job = dataclasses.replace(job, model=pinned)
    max_length = settle_max_length(job.max_model_len, facts)
    if KINDS[kind].needs_tokenizer and not facts.has_tokenizer:
        raise InputError(
            f"{job.model.path}: the model has no tokenizer, so text cannot be read. Name one with "
            "--tokenizer, or give token ids with --token-ids-column."
        )
    try:
        sampling, origins = resolve_sampling(job.sampling, facts.defaults)
    except ValueError as error:
        raise SettingError(f"{error}.") from error
    _check_sampling(job, sampling, facts, max_length)
    num_rows = min(source.num_rows, job.limit) if job.limit is not None else source.num_rows
    dtype = settle_dtype(job.model, facts, device)
    row_bytes = sampling.max_new_tokens * bulky_bytes_per_token(job, facts.vocab_size)
    plan = Plan(
        job=job,
        source=source,
        facts=facts,
        sampling=sampling,
        origins=origins,
        kind=kind,
        prompt_column=prompt_column,
        kept_columns=tuple(kept),
        max_length=max_length,
        num_rows=num_rows,
        rows_per_shard=settle_rows_per_shard(job, num_rows, row_bytes),
        device=device,
        dtype=dtype,
        kernels=engine.find_kernels(job.model.kernels, device, dtype),
        notes=_notes(job, facts, sampling, origins, kind),
    )
    output_schema(plan)
    return plan


def _anchored(job: Job, *, reads_model: bool) -> Job:
    """The job with absolute paths: workers run in another folder than the user's."""

    def absolute(path: str) -> str:
        is_path = path != DEMO and os.path.exists(path)
        return os.path.abspath(path) if is_path else path

    model = job.model
    if reads_model:
        tokenizer = None if model.tokenizer is None else absolute(model.tokenizer)
        model = dataclasses.replace(model, path=absolute(model.path), tokenizer=tokenizer)
    source = job.input if "://" in job.input else os.path.abspath(job.input)
    return dataclasses.replace(job, model=model, input=source, output=absolute_folder(job.output))


def _notes(
    job: Job, facts: ModelFacts, sampling: RowSampling, origins: Mapping[str, Origin], kind: str
) -> tuple[str, ...]:
    """What nobody asked for and yet decides what comes out, in sentences."""
    notes = list(facts.notes)
    taken = [name for name, origin in origins.items() if origin == "model"]
    if taken:
        values = ", ".join(f"{name} {getattr(sampling, name):g}" for name in taken)
        notes.append(f"From the model's generation config: {values}.")
    endings = sorted({*facts.eos_token_ids, *sampling.stop_token_ids})
    if sampling.ignore_eos or not endings:
        notes.append("No token ends a row.")
    else:
        notes.append(f"A row ends with {_tokens(endings)}.")
    if KINDS[kind].needs_tokenizer:
        before, after = facts.added_token_ids
        added = [*before, *after] if job.add_special_tokens != "no" else []
        notes.append(f"The tokenizer adds {_tokens(added) if added else 'nothing'} to a text.")
    return tuple(notes)


def _tokens(token_ids: Sequence[int]) -> str:
    return f"token{'s' * (len(token_ids) > 1)} {', '.join(map(str, token_ids))}"


def _check_places(job: Job, source: RowSource) -> None:
    """Neither may the output destroy the input, nor become part of it."""
    if is_uri(job.output):  # The input lies on a disk.
        return
    output = os.path.realpath(job.output)
    for file in source.files:
        if _is_inside(os.path.realpath(file.path), output):
            raise SettingError(
                f"{file.path}: the input lies inside the output folder. Choose another folder."
            )
    is_deep = os.path.isdir(job.input) or "**" in job.input
    folder = job.input if os.path.isdir(job.input) else fixed_folder(job.input)
    if is_deep and _is_inside(output, os.path.realpath(folder)):
        raise SettingError(
            f"{job.output}: the output lies inside the input, where another run would read it. "
            "Choose a folder elsewhere."
        )


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(os.path.join(folder, ""))


def _find_prompt_column(job: Job, source: RowSource) -> tuple[str, str]:
    """The kind's name and its column: the one asked for, or the one kind whose column is there."""
    columns = source.schema.names
    asked = {name: getattr(job, name) for name in KINDS if getattr(job, name) is not None}
    found = asked or {
        name: kind.default_column for name, kind in KINDS.items() if kind.default_column in columns
    }
    defaults = " or ".join(repr(kind.default_column) for kind in KINDS.values())
    flags = " or ".join(f"--{name.replace('_', '-')}" for name in KINDS)
    has = f"It has: {', '.join(columns) or 'no columns'}."
    if not found:
        raise InputError(f"{job.input}: no column {defaults}. {has} Choose one with {flags}.")
    if len(found) > 1:
        raise InputError(
            f"{job.input}: has both {' and '.join(map(repr, found.values()))}. Choose with {flags}."
        )
    [(name, column)] = found.items()
    if column not in columns:
        raise InputError(
            f"{job.input}: no column {column!r}. {has} Use --{name.replace('_', '-')}."
        )
    if column in source.lacking:
        raise InputError(
            f"{source.lacking[column]}: no column {column!r}, which other files have. Leave the "
            "file out, or rename its column."
        )
    type_ = source.schema.field(column).type
    if not KINDS[name].accepts(type_):
        raise InputError(
            f"{job.input}: column {column!r} holds {type_}; --{name.replace('_', '-')} needs "
            f"{KINDS[name].wanted}."
        )
    return name, column


def _find_kept_columns(job: Job, source: RowSource) -> Sequence[str]:
    columns = source.schema.names
    missing = [name for name in job.keep or () if name not in columns]
    if missing:
        raise InputError(
            f"{job.input}: no column {missing[0]!r} to keep. It has: {', '.join(columns)}."
        )
    return columns if job.keep is None else list(dict.fromkeys(job.keep))


def _check_capabilities(job: Job, capabilities: Capabilities) -> None:
    name = job.model.engine
    if job.output_logits and not capabilities.logits:
        raise SettingError(f"engine {name} cannot return logits. Use --engine torch.")
    limit = capabilities.max_logprobs
    if job.logprobs is not None and limit is not None and job.logprobs > limit:
        raise SettingError(
            f"engine {name} returns at most {limit} logprobs, and {job.logprobs} were asked for. "
            "Ask for fewer, or use --engine torch."
        )


def _check_sampling(job: Job, sampling: RowSampling, facts: ModelFacts, max_length: int) -> None:
    try:
        check_min_against_max(sampling)
    except ValueError as error:
        hint = (
            ""
            if job.sampling.min_new_tokens is not None
            else (" The least is from the model's generation config: give --min-new-tokens.")
        )
        raise SettingError(f"{error}.{hint}") from error
    if sampling.max_new_tokens >= max_length:
        raise SettingError(
            f"max_new_tokens must be between 1 and {max_length - 1}, got "
            f"{sampling.max_new_tokens}: a row holds {max_length} tokens, prompt included."
        )
    if job.logprobs is not None and job.logprobs > facts.vocab_size:
        raise SettingError(
            f"logprobs must be between 0 and {facts.vocab_size}, the size of the vocabulary, got "
            f"{job.logprobs}."
        )
    for token_id in sorted(sampling.stop_token_ids):
        if not 0 <= token_id < facts.vocab_size:
            raise SettingError(
                f"stop_token_id must be between 0 and {facts.vocab_size - 1}, got {token_id}."
            )
    token_bytes = bulky_bytes_per_token(job, facts.vocab_size)
    if sampling.max_new_tokens * token_bytes > job.packing.logits_budget_bytes:
        raise SettingError(
            f"a row's logits and alternatives can take {sampling.max_new_tokens} tokens x "
            f"{token_bytes:,} bytes = {sampling.max_new_tokens * token_bytes:,} bytes, more than "
            f"the logits budget of {job.packing.logits_budget_bytes:,}. Ask for fewer new tokens, "
            "or raise --logits-budget."
        )
