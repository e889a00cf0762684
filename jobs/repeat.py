"""A finished row beside what its model answers now."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jobs.cells import equal_cells, greatest_difference, plain_cell
from jobs.completion import Completion
from jobs.folder import part_name
from jobs.parts import is_bulky, read_part
from jobs.plan import Plan, Shard
from jobs.rows import Rows
from jobs.schema import output_schema, output_table
from jobs.scoring import SUMS
from jobs.storage import join


@dataclass(frozen=True, slots=True)
class Repeat:
    """How a row that was answered once more compares with what the part says."""

    row_id: int
    is_same: bool
    "True if tokens, text and log-probabilities are equal to the last bit."
    problem: str | None
    "What is different but log-probabilities; None if nothing is."
    logprob_difference: float
    "The greatest, in nats, over the tokens that both have."


def compare_rows(
    plan: Plan, shard: Shard, again: Mapping[int, Completion], rows: Rows
) -> list[Repeat]:
    """Compares completions, by row_id, with the rows of the shard's part. rows: of its input."""
    schema = output_schema(plan)
    names = _answer_names(plan) if plan.job.scoring is None else _score_names(plan, schema)
    path = join(plan.job.output, part_name(shard.index, plan.job.output_format))
    prefix, kept = plan.job.output_prefix, list(plan.kept_columns)
    table = read_part(path, [*(prefix + name for name in names), *kept])
    columns = {name: table.column(prefix + name) for name in names}
    repeats = []
    for row_id, completion in sorted(again.items()):
        place = row_id - shard.start
        row = {name: column[place].as_py() for name, column in columns.items()}
        if _may_pass(row["error"]):
            continue
        if plan.job.scoring is None:
            repeat = _compare(row, completion)
        else:
            again_as_row = output_table(plan, schema, rows.slice(place, 1), [completion])
            now = {name: again_as_row.column(prefix + name)[0] for name in names}
            then = {name: column[place] for name, column in columns.items()}
            repeat = _compare_scores(row_id, then, now)
        for name in kept:
            if not equal_cells(
                plain_cell(table.column(name)[place]), plain_cell(rows[name][place])
            ):
                said = f"the input's {name} is not what stands beside the answer"
                repeat = replace(repeat, is_same=False, problem=repeat.problem or said)
        repeats.append(repeat)
    return repeats


def _answer_names(plan: Plan) -> list[str]:
    names = ["token_ids", "finish_reason", "stop_reason", "seed", "text", "error", "truncated"]
    names += ["num_prompt_tokens"]
    names += ["logprobs"] * (plan.job.logprobs is not None)
    names += ["prompt_token_ids", "prompt_logprobs"] * (plan.job.prompt_logprobs is not None)
    names += ["prompt_top_ids", "prompt_top_logprobs"] * bool(plan.job.prompt_logprobs)
    return names + ["top_ids", "top_logprobs"] * bool(plan.job.logprobs)


def _score_names(plan: Plan, schema: pa.Schema) -> list[str]:
    """All columns of ours but logits, which are too big to be compared row by row."""
    prefix, kept = plan.job.output_prefix, set(plan.kept_columns)
    own = [field for field in schema if field.name not in kept and not is_bulky(field)]
    return [field.name.removeprefix(prefix) for field in own]


def _compare_scores(
    row_id: int, then: Mapping[str, pa.Scalar], now: Mapping[str, pa.Scalar]
) -> Repeat:
    """Cell by cell; log-probabilities may be a little apart, and sums by so much a token."""
    is_same, difference, problem = True, 0.0, None
    for name, old in then.items():
        new = now[name]
        if equal_cells(old, new):
            continue
        is_same = False
        if name in (*SUMS, "logprobs") and old.is_valid and new.is_valid:
            pair = [np.atleast_1d(np.asarray(cell.as_py(), np.float64)) for cell in (old, new)]
            if len(pair[0]) == len(pair[1]):
                size = 1 if name == "logprobs" else _num_tokens(then)
                difference = max(difference, greatest_difference(*pair) / size)
                continue
        said = f"{name} was {old.as_py()!r}, is now {new.as_py()!r}"
        problem = problem or said
    return Repeat(row_id, is_same, problem, difference)


def _num_tokens(row: Mapping[str, pa.Scalar]) -> int:
    """Tokens of a row's sums, or of the shortest of them."""
    name = "choice_num_tokens" if "choice_num_tokens" in row else "num_scored_tokens"
    lengths = row[name].as_py() or 1
    return max(1, min(lengths) if isinstance(lengths, list) else lengths)


def _may_pass(error: Mapping[str, Any] | None) -> bool:
    """True for an error of chance: that the row is answered now is no fault."""
    return error is not None and bool(error["retryable"])


def _compare(row: Mapping[str, Any], completion: Completion) -> Repeat:
    then, now = _array(row["token_ids"], np.int64), _array(completion.token_ids, np.int64)
    common = min(len(then), len(now))
    differing = np.flatnonzero(then[:common] != now[:common])
    upto = int(differing[0]) if len(differing) else common
    difference = 0.0
    if row.get("logprobs") is not None and completion.logprobs is not None:
        old = np.asarray(row["logprobs"], np.float64)[:upto]
        new = completion.logprobs[:upto].astype(np.float64)
        difference = greatest_difference(old, new)
    problem = _problem(row, completion, then, now, upto)
    is_same = _same_alternatives(
        row.get("top_ids"), row.get("top_logprobs"), completion.top_ids, completion.top_logprobs
    )
    scores = completion.prompt_scores
    if scores is not None and row.get("prompt_logprobs") is not None:
        if scores.token_ids.tolist() != row["prompt_token_ids"]:
            problem = problem or "the prompt's tokens are others now"
        else:
            old = np.asarray(row["prompt_logprobs"][1:], np.float64)  # The first is null.
            difference = max(difference, greatest_difference(old, scores.logprobs.astype(float)))
            is_same = is_same and _same_alternatives(
                (row.get("prompt_top_ids") or [None])[1:],
                (row.get("prompt_top_logprobs") or [None])[1:],
                scores.top_ids,
                scores.top_logprobs,
            )
    is_same = is_same and problem is None and difference == 0
    return Repeat(completion.row_id, is_same, problem, difference)


def _problem(
    row: Mapping[str, Any],
    completion: Completion,
    then: npt.NDArray[np.int64],
    now: npt.NDArray[np.int64],
    upto: int,
) -> str | None:
    """The first thing that is different, in words."""
    if upto < min(len(then), len(now)):
        return f"new token {upto} was {then[upto]}, is now {now[upto]}"
    if len(then) != len(now):
        return f"had {len(then)} new tokens, has {len(now)} now"
    code = None if completion.error is None else completion.error.code
    pairs = {
        "finish_reason": (row["finish_reason"], completion.finish_reason),
        "stop_reason": (row["stop_reason"], completion.stop_reason),
        "seed": (row["seed"], completion.seed),
        "text": (row["text"], completion.text),
        "truncated": (row["truncated"], completion.truncated),
        "num_prompt_tokens": (row["num_prompt_tokens"], completion.num_prompt_tokens),
        "error": (None if row["error"] is None else row["error"]["code"], code),
    }
    for name, (old, new) in pairs.items():
        if old != new:
            return f"{name} was {old!r}, is now {new!r}"
    return None


def _same_alternatives(
    ids: list[list[int]] | None,
    logprobs: list[list[float]] | None,
    new_ids: npt.NDArray[np.int32] | None,
    new_logprobs: npt.NDArray[np.float32] | None,
) -> bool:
    if ids is None or new_ids is None:
        return True
    if not new_ids.size and not ids:
        return True
    if new_ids.tolist() != ids or new_logprobs is None:
        return False
    old = np.asarray(logprobs, np.float32).reshape(new_logprobs.shape)
    return np.array_equal(old, new_logprobs, equal_nan=True)


def _array(values: Any, dtype: type[np.int64]) -> npt.NDArray[np.int64]:
    return np.asarray([] if values is None else values, dtype)
