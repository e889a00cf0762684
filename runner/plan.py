"""From a job to a plan: the input looked at, the model asked, every open value settled."""

import dataclasses
import os
from collections.abc import Mapping

from jobs.errors import InputError, SettingError
from jobs.files import RowSource, fixed_folder, scan_input
from jobs.job import Job
from jobs.kinds.given import is_messages
from jobs.model import DEMO, ModelFacts, check_compile, settle_dtype
from jobs.plan import Plan, bulky_bytes_per_token, settle_rows_per_shard
from jobs.sampling import Origin, RowSampling, check_min_against_max, resolve_sampling
from jobs.schema import output_schema
from jobs.storage import absolute_folder, is_uri
from runner.columns import find_kept_columns, find_prompt_columns, holds_text
from runner.notes import describe_plan
from workers.engine import Capabilities, load_engine, settle_max_length


def make_plan(job: Job) -> Plan:
    """Settles a job against its files and its model. Reads footers and config files only.

    Raises JobError for whatever a user can get wrong about either.
    """
    engine = load_engine(job.model.engine)
    job = _anchored(job, reads_model=engine.capabilities.reads_model)
    source = scan_input(job.input)
    _check_places(job, source)
    kind, prompt_columns = find_prompt_columns(job, source)
    reads_text = holds_text(source, kind, prompt_columns)
    kept = find_kept_columns(job, source)
    _check_capabilities(job, engine.capabilities)
    device = engine.find_device(job.model.device)
    check_compile(job.model, device)
    facts = engine.read_facts(job.model)
    if facts.revision is not None:
        pinned = dataclasses.replace(job.model, revision=facts.revision)
        job = dataclasses.replace(job, model=pinned)
    max_length = settle_max_length(job.max_model_len, facts)
    if reads_text and not facts.has_tokenizer:
        instead = "token ids with --token-ids-column" if job.scoring is None else "token ids"
        raise InputError(
            f"{job.model.path}: the model has no tokenizer, so text cannot be read. Name one with "
            f"--tokenizer, or give {instead}."
        )
    _check_chats(job, source, prompt_columns, facts)
    sampling, origins = _settle_sampling(job, kind, facts, max_length)
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
        prompt_columns=prompt_columns,
        reads_text=reads_text,
        kept_columns=tuple(kept),
        max_length=max_length,
        num_rows=num_rows,
        rows_per_shard=settle_rows_per_shard(job, num_rows, row_bytes),
        device=device,
        dtype=dtype,
        kernels=engine.find_kernels(job.model.kernels, device, dtype),
        notes=(),
    )
    plan = dataclasses.replace(plan, notes=describe_plan(plan))
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


def _settle_sampling(
    job: Job, kind: str, facts: ModelFacts, max_length: int
) -> tuple[RowSampling, dict[str, Origin]]:
    """Sampling with no value left open, and who chose each."""
    if job.scoring is not None:
        if job.scoring.pmi and kind != "choices":
            raise SettingError(f"pmi is for choices, and these rows are {kind}. Leave it out.")
        if job.scoring.pmi and facts.first_token_id is None:
            raise SettingError(
                f"{job.model.path}: pmi scores choices behind BOS or EOS, and the model names "
                "neither. Leave it out."
            )
        return RowSampling(job.sampling.max_new_tokens), {}
    try:
        sampling, origins = resolve_sampling(job.sampling, facts.defaults)
    except ValueError as error:
        raise SettingError(f"{error}.") from error
    _check_sampling(job, sampling, facts, max_length)
    return sampling, origins


def _check_chats(
    job: Job, source: RowSource, columns: Mapping[str, str], facts: ModelFacts
) -> None:
    chats = [c for c in columns.values() if is_messages(source.schema.field(c).type)]
    if chats and not facts.has_chat_template:
        raise InputError(
            f"{job.model.path}: the model has no chat template, so the messages of column "
            f"{chats[0]!r} cannot be read. Name a --tokenizer that has one, or give text."
        )


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
    for name, number in (("logprobs", job.logprobs), ("prompt_logprobs", job.prompt_logprobs)):
        if number is not None and number > facts.vocab_size:
            raise SettingError(
                f"{name} must be between 0 and {facts.vocab_size}, the size of the vocabulary, got "
                f"{number}."
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
