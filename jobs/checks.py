"""What must be true of a part, looked at without its model: every row once, and columns that agree.

Each check yields what is wrong in sentences; nothing is raised for what a part holds.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import isclose

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from jobs.cells import flat_numbers
from jobs.errors import OutputError
from jobs.parts import (
    hash_part,
    part_num_rows,
    part_schema,
    part_size,
    read_pieces,
    same_schema,
)
from jobs.plan import Shard
from jobs.report import Counts, ShardReport
from jobs.score_checks import check_scores, count_scores, num_scored
from jobs.storage import name_of

_REASONS = {"stop", "length", "abort", "error"}
_BY_TOKEN = ("token_ids", "logprobs", "top_ids", "top_logprobs", "logits")
_COUNTED = (
    "rows", "failed", "truncated", "prompt_tokens", "new_tokens",
    "scored_tokens", "scored_bytes", "scored_words", "greedy",
)  # fmt: skip
_REMEDY = "Delete it, and have it done again with --resume."
_TOLERANCE = 5e-6
"Most that a log-probability may be away from its logits, in nats."
_HALF_PRECISION = 2.0**-10
"What float16 may take off a logit and off the sum of all, as a share of the greatest of them."


@dataclass(frozen=True, slots=True)
class Expected:
    """What the job says of its parts."""

    schema: pa.Schema
    prefix: str
    "Stands before the names of our columns."
    kept_columns: Collection[str]
    "The input's, which may be called anything."
    first_plain_step: int | None
    "From which new token on log-probabilities are those of the raw logits; None for never."


def check_part(path: str, shard: Shard, record: ShardReport, expected: Expected) -> Iterator[str]:
    """Yields all that is wrong with a part: its checksum, its schema, its rows, its counts."""
    name = name_of(path)
    try:
        for problem in _check_file(path, shard, record, expected):
            yield f"{name}: {problem}"
    except OutputError as error:
        yield str(error)
    except (OSError, ValueError, LookupError, TypeError, pa.ArrowException) as error:
        yield f"{name}: cannot be checked: {error!r}"


def _check_file(path: str, shard: Shard, record: ShardReport, expected: Expected) -> Iterator[str]:
    size = part_size(path)
    if size != record.part.size_bytes:
        yield f"has {size} bytes, and {record.part.size_bytes} in its record. {_REMEDY}"
        return
    digest = hash_part(path)
    if digest != record.part.sha256:
        yield f"its checksum is {digest}, and {record.part.sha256} in its record. {_REMEDY}"
        return  # A reader trusts what is in a file. This one is not what was written.
    if part_num_rows(path) != shard.num_rows:
        yield f"has {part_num_rows(path)} rows; {shard.num_rows} were planned."
        return
    if not same_schema(part_schema(path), expected.schema):
        yield "its schema is not that of the job."
        return
    counts, start = Counts(), shard.start
    for piece in read_pieces(path):
        rows = _own(piece, expected)
        yield from _check_rows(rows, start, expected)
        counts += _count(rows)
        start += piece.num_rows
    found, said = counts.record(), record.counts.record()
    for field in _COUNTED:
        if found[field] != said[field]:
            yield f"{field} is {found[field]}, and {said[field]} in its record."
    # Floats that were added up in another order.
    if not isclose(counts.loglikelihood, record.counts.loglikelihood, rel_tol=1e-9, abs_tol=1e-9):
        there = record.counts.loglikelihood
        yield f"loglikelihood is {counts.loglikelihood}, and {there} in its record."


def _own(table: pa.Table, expected: Expected) -> dict[str, pa.ChunkedArray]:
    """Our columns, by their names without the prefix."""
    return {
        name.removeprefix(expected.prefix): table.column(name)
        for name in table.column_names
        if name not in expected.kept_columns
    }


def _check_rows(
    rows: Mapping[str, pa.ChunkedArray], start: int, expected: Expected
) -> Iterator[str]:
    row_ids = rows["row_id"].to_numpy()
    stop = start + len(row_ids)
    if not np.array_equal(row_ids, np.arange(start, stop)):
        yield f"rows {start} to {stop - 1} should be here, in order; row_id says otherwise."
    if "finish_reason" in rows:
        yield from _check_endings(rows, start)
        lengths = rows["num_generated_tokens"].to_pylist()
        yield from _check_prompts(rows, start)
    else:
        yield from check_scores(rows, start)
        lengths = num_scored(rows)
    for name in (name for name in _BY_TOKEN if name in rows):
        for place, length in enumerate(pc.list_value_length(rows[name]).to_pylist()):
            if length != lengths[place]:
                tokens = f"{lengths[place]} tokens"
                yield f"row {start + place}: {name} has {length} entries for {tokens}."
                return  # Nothing that follows could be compared.
    if "cumulative_logprob" in rows:
        yield from _check_sums(rows, start)
    if "logprobs" in rows and "logits" in rows and expected.first_plain_step is not None:
        yield from _check_logprobs(rows, start, expected.first_plain_step)


def _check_endings(rows: Mapping[str, pa.ChunkedArray], start: int) -> Iterator[str]:
    reasons = rows["finish_reason"].to_pylist()
    lengths = rows["num_generated_tokens"].to_pylist()
    failed = pc.is_valid(rows["error"]).to_pylist()
    for place, (reason, length, is_error) in enumerate(zip(reasons, lengths, failed, strict=True)):
        if reason not in _REASONS:
            yield f"row {start + place}: finish_reason is {reason!r}."
        if is_error != (reason == "error") or is_error != (length is None):
            yield (
                f"row {start + place}: finish_reason is {reason!r}, error is "
                f"{'set' if is_error else 'null'}, num_generated_tokens is {length}."
            )


def _check_prompts(rows: Mapping[str, pa.ChunkedArray], start: int) -> Iterator[str]:
    failed = pc.is_valid(rows["error"]).to_pylist()
    said = rows["num_prompt_tokens"].to_pylist()
    for name in (name for name in rows if name.startswith("prompt_")):
        for place, length in enumerate(pc.list_value_length(rows[name]).to_pylist()):
            wanted = None if failed[place] else said[place]
            if length != wanted:
                yield f"row {start + place}: {name} has {length} entries for {said[place]} tokens."
            elif length and name != "prompt_token_ids" and rows[name][place][0].is_valid:
                yield f"row {start + place}: {name} does not begin with null."


def _check_sums(rows: Mapping[str, pa.ChunkedArray], start: int) -> Iterator[str]:
    sums = rows["cumulative_logprob"].to_pylist()
    for place, said in enumerate(sums):
        if said is None:
            continue
        found = float(np.sum(_numbers(rows["logprobs"], place), dtype=np.float64))
        if not np.isclose(found, said, rtol=1e-9, atol=1e-9, equal_nan=True):
            yield f"row {start + place}: logprobs add up to {found}, cumulative_logprob is {said}."


def _check_logprobs(
    rows: Mapping[str, pa.ChunkedArray], start: int, first_step: int
) -> Iterator[str]:
    """Log-probabilities against a float64 log-softmax of the logits beside them."""
    is_half = pa.types.is_float16(rows["logits"].type.value_type.value_type)
    for place in range(len(rows["row_id"])):
        token_ids = _numbers(rows["token_ids"], place)[first_step:]
        if not len(token_ids):
            continue
        width = _width(rows["logits"])
        if token_ids.min() < 0 or token_ids.max() >= width:
            yield f"row {start + place}: a token id is none of {width} words."
            continue
        wide = _numbers(rows["logits"], place).reshape(-1, width)[first_step:].astype(np.float64)
        top = wide.max(axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):  # float16 has made the greatest infinite.
            sums = np.log(np.exp(wide - top).sum(axis=1)) + top[:, 0]
            found = wide[np.arange(len(token_ids)), token_ids] - sums
            logprobs = _numbers(rows["logprobs"], place)[first_step:].astype(np.float64)
            away = np.where(found == logprobs, 0.0, np.abs(found - logprobs))
            allowed = _TOLERANCE + is_half * _HALF_PRECISION * np.abs(wide).max(axis=1)
        # What float16 has made infinite says nothing any more.
        wrong = ~(away <= allowed) & ~(is_half & np.isinf(wide).any(axis=1))
        if wrong.any():
            step = int(np.argmax(wrong))
            yield (
                f"row {start + place}: the logprob of token {first_step + step} is "
                f"{logprobs[step]:.7f}, and its logits say {found[step]:.7f}."
            )


def _numbers(column: pa.ChunkedArray, place: int) -> npt.NDArray[np.generic]:
    """All numbers of one cell, flat; none if it is null."""
    numbers = flat_numbers(column[place])
    return np.empty(0, np.float32) if numbers is None else numbers


def _width(column: pa.ChunkedArray) -> int:
    return int(column.type.value_type.list_size)


def _count(rows: Mapping[str, pa.ChunkedArray]) -> Counts:
    is_answer = pc.is_null(rows["error"])
    codes = pc.struct_field(pc.drop_null(rows["error"]), "code").to_pylist()
    answers = (
        count_scores(rows)
        if "finish_reason" not in rows
        else Counts(new_tokens=pc.sum(rows["num_generated_tokens"]).as_py() or 0)
    )
    return answers + Counts(
        rows=len(rows["row_id"]),
        failed=Counter(codes),
        truncated=pc.sum(rows["truncated"]).as_py() or 0,
        prompt_tokens=pc.sum(rows["num_prompt_tokens"].filter(is_answer)).as_py() or 0,
    )
