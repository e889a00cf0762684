"""What generate() accepts, checked in the seed's order: the first thing wrong is the one named.

1. token ids and mask              8. rows over the batch size
2. a model that continues text     9. tokens over the prefill budget
3. ignore_eos with speculation    10. graph capture with data parallelism
4. max_new_tokens                 11. a batch open on an overlapping pipeline
5. sampling values                12. what is to be returned
6. penalties not applied
7. min above max, then each row
"""

import dataclasses
from collections.abc import Iterable, Sequence
from operator import index
from typing import Literal, SupportsIndex

from jobs.completion import Capture
from jobs.sampling import (
    MASK_64,
    RowSampling,
    Sampling,
    as_integer,
    check_min_against_max,
    check_sampling,
    check_stop_token_ids,
    resolve_sampling,
)
from workers.pipeline import BatchPipeline, RowContext
from workers.turns import Turns

Rows = Iterable[Iterable[SupportsIndex]]


def read_contexts(
    pipeline: BatchPipeline,
    input_ids: Rows,
    attention_mask: Rows | None,
    sampling: Sampling,
    caller: str,
) -> list[RowContext]:
    """Makes the rows of a batch from what a caller gave: checks 1 to 5, and stop ids and seed.

    Row i draws from seed + i * 2**32, so that identical prompts differ and a rerun repeats.
    """
    try:
        rows = _apply_mask(read_rows("input_ids", input_ids), attention_mask)
        _check_model(pipeline, sampling.ignore_eos)
        settled = _settle(pipeline, sampling)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{caller}: {error}") from error
    seed = index(sampling.seed)
    return [
        RowContext(token_ids, settled, (seed + (row << 32)) & MASK_64)
        for row, token_ids in enumerate(rows)
    ]


def check_contexts(
    pipeline: BatchPipeline,
    contexts: Sequence[RowContext],
    caller: str,
    turns: Turns | None = None,
) -> None:
    """Checks 2, 3 and 6 to 11: whether the pipeline can run these rows.

    turns: how many of them are live at a time. None: all.
    Raises ValueError, or RuntimeError if another batch stands in the way.
    """
    try:
        _check_model(pipeline, any(context.sampling.ignore_eos for context in contexts))
        _check_penalties(pipeline, contexts)
        for context in contexts:
            check_sampling(context.sampling)
            check_min_against_max(context.sampling)
        for row, context in enumerate(contexts):
            _check_row(pipeline, row, context)
        _check_batch(pipeline, contexts, turns)
    except (TypeError, ValueError, RuntimeError) as error:
        raise type(error)(f"{caller}: {error}") from error


def read_capture(
    output_logits: bool, output_logprobs: SupportsIndex | Literal["chosen"], caller: str
) -> Capture:
    """Reads what a caller wants returned. Raises TypeError for what is no number."""
    if isinstance(output_logprobs, str) and output_logprobs == "chosen":
        return Capture(logprobs=0, logits=bool(output_logits))
    try:
        count = as_integer("output_logprobs", output_logprobs)
    except TypeError as error:
        raise TypeError(f"{caller}: {error}") from error
    return Capture(logprobs=count if count != 0 else None, logits=bool(output_logits))


def check_capture(pipeline: BatchPipeline, capture: Capture, caller: str) -> None:
    """Check 12: whether the pipeline can return what is asked. Raises ValueError."""
    if capture.logprobs is not None and not 0 <= capture.logprobs <= pipeline.vocab_size:
        raise ValueError(
            f"{caller}: output_logprobs must be between 0 and {pipeline.vocab_size}, got "
            f"{capture.logprobs}"
        )
    if capture.logits and pipeline.overlap_active:
        raise ValueError(f"{caller}: a pipeline that overlaps its steps cannot return logits")


def read_rows(name: str, rows: object) -> list[tuple[int, ...]]:
    """Rows of token ids. Raises TypeError."""
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise TypeError(f"{name} must be rows of token ids, got {type(rows).__name__}")
    return [_read_row(name, number, row) for number, row in enumerate(rows)]


def _read_row(name: str, number: int, row: object) -> tuple[int, ...]:
    # Arrays and tensors hand out their numbers at once; one by one would be slow.
    values = row.tolist() if hasattr(row, "tolist") else row
    if isinstance(values, SupportsIndex):
        raise TypeError(
            f"{name} must be a list of rows, but row {number} is the number {values!r}. "
            "Wrap one prompt as [ids]"
        )
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: row {number} must hold integers, got {values!r}")
    return tuple(as_integer(f"{name}: an entry of row {number}", value) for value in values)


def _apply_mask(rows: list[tuple[int, ...]], attention_mask: Rows | None) -> list[tuple[int, ...]]:
    if attention_mask is None:
        return rows
    masks = read_rows("attention_mask", attention_mask)
    lengths, mask_lengths = [len(row) for row in rows], [len(mask) for mask in masks]
    if lengths != mask_lengths:
        raise ValueError(
            f"attention_mask has rows of {mask_lengths} entries, input_ids of {lengths}. "
            "They must agree"
        )
    return [
        tuple(token_id for token_id, kept in zip(row, mask, strict=True) if kept)
        for row, mask in zip(rows, masks, strict=True)
    ]


def _settle(pipeline: BatchPipeline, sampling: Sampling) -> RowSampling:
    stop_token_ids: object = sampling.stop_token_ids
    check_sampling(dataclasses.replace(sampling, stop_token_ids=()))
    if isinstance(stop_token_ids, str | bytes) or not isinstance(stop_token_ids, Iterable):
        raise TypeError(f"stop_token_ids must be integers in a list, got {stop_token_ids!r}")
    sampling = dataclasses.replace(sampling, stop_token_ids=tuple(stop_token_ids))
    check_stop_token_ids(sampling.stop_token_ids)
    return resolve_sampling(sampling, pipeline.sampling_defaults)[0]


def _check_model(pipeline: BatchPipeline, ignore_eos: bool) -> None:
    if not pipeline.is_text_generator:
        raise ValueError("the pipeline's model does not generate text. Open another model")
    if ignore_eos and pipeline.is_speculative:
        raise ValueError(
            "ignore_eos cannot be used with speculative decoding, whose steps differ in length. "
            "Open the pipeline without it"
        )


def _check_penalties(pipeline: BatchPipeline, contexts: Sequence[RowContext]) -> None:
    if pipeline.applies_penalties:
        return
    if any(context.sampling.has_penalties for context in contexts):
        raise ValueError("the pipeline applies no penalties. Leave them unset")


def _check_row(pipeline: BatchPipeline, row: int, context: RowContext) -> None:
    sampling, max_length = context.sampling, pipeline.limits.max_length
    length = len(context.token_ids)
    fewest = max(sampling.min_new_tokens, 1)
    if length + fewest > max_length:
        raise ValueError(
            f"row {row} has {length} tokens and needs room for {fewest} more, but the pipeline "
            f"was opened for rows of {max_length}. Shorten it, or open with a larger max_length"
        )
    if sampling.ignore_eos and length + sampling.max_new_tokens > max_length:
        raise ValueError(
            f"row {row} has {length} tokens and ignore_eos asks for {sampling.max_new_tokens} "
            f"more, but the pipeline was opened for rows of {max_length}. Ask for fewer, or open "
            "with a larger max_length"
        )
    if not length:
        raise ValueError(f"row {row} is empty. Give it at least one token")
    check_ids(f"row {row}", context.token_ids, pipeline.vocab_size)
    check_ids("stop_token_ids", sampling.stop_token_ids, pipeline.vocab_size)


def check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises ValueError for an id that the model does not know."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{name} holds the token id {token_id}; the model knows 0 to {vocab_size - 1}"
            )


def _check_batch(
    pipeline: BatchPipeline, contexts: Sequence[RowContext], turns: Turns | None
) -> None:
    limits = pipeline.limits
    num_live = len(contexts) if turns is None else min(turns.max_live, len(contexts))
    if num_live > limits.max_batch_size:
        raise ValueError(
            f"{num_live} rows are more than the {limits.max_batch_size} the pipeline was "
            "opened for. Give fewer, or open with a larger max_batch_size"
        )
    num_tokens = sum(len(context.token_ids) for context in contexts)
    if turns is None and num_tokens > limits.max_prefill_tokens:
        raise ValueError(
            f"the prompts have {num_tokens} tokens together, more than the "
            f"{limits.max_prefill_tokens} the pipeline was opened for. Give fewer rows, or open "
            "with a larger max_prefill_tokens"
        )
    if pipeline.graph_capture_ready and pipeline.data_parallel_degree > 1:
        raise ValueError(
            "captured device graphs cannot be replayed on "
            f"{pipeline.data_parallel_degree} replicas. Open the pipeline without one of the two"
        )
    if pipeline.overlap_active and pipeline.num_open_rows:
        raise RuntimeError(
            "another batch is open, and this pipeline returns each step's tokens one call late. "
            "Close it first"
        )
