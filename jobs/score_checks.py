"""What must be true of a part of scores: columns that agree with each other, and their counts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from jobs.report import Counts
from jobs.scoring import PREDICTIONS, Score, Scores

Rows = Mapping[str, pa.ChunkedArray]
"Our columns, by their names without the prefix."

_TOLERANCE = 1e-9
"Of a sum that was added up in another order, as a share of it."


def num_scored(rows: Rows) -> list[int | None]:
    """Scored tokens of each row; None of one with an error."""
    if "choice_num_tokens" not in rows:
        lengths: list[int | None] = rows["num_scored_tokens"].to_pylist()
        return lengths
    counts = rows["choice_num_tokens"].to_pylist()
    return [None if numbers is None else sum(numbers) for numbers in counts]


def count_scores(rows: Rows) -> Counts:
    """What the rows add up to. Labels are the input's and are not counted."""
    tokens = sum(number or 0 for number in num_scored(rows))
    if "choice_num_tokens" in rows:
        return Counts(scored_tokens=tokens)
    return Counts(
        scored_tokens=tokens,
        scored_bytes=pc.sum(rows["num_scored_bytes"]).as_py() or 0,
        scored_words=pc.sum(rows["num_scored_words"]).as_py() or 0,
        loglikelihood=pc.sum(rows["loglikelihood"]).as_py() or 0.0,
        greedy=pc.sum(rows["is_greedy"]).as_py() or 0,
    )


def check_scores(rows: Rows, start: int) -> Iterator[str]:
    """Yields what is wrong: errors beside scores, sums, and choices that are not the likeliest."""
    has_choices = "choice_loglikelihoods" in rows
    names = [name for name in rows if name.startswith("choice_" if has_choices else "num_scored")]
    names += [] if has_choices else ["loglikelihood", "is_greedy"]
    names += [name for name in PREDICTIONS if name in rows]
    names += [name for name in ("logprobs",) if name in rows]
    columns = {name: rows[name].to_pylist() for name in names}
    failed = pc.is_valid(rows["error"]).to_pylist()
    sums = "choice_loglikelihoods" if has_choices else "loglikelihood"
    for place, is_error in enumerate(failed):
        row = {name: values[place] for name, values in columns.items()}
        if is_error != (row[sums] is None):
            said = f"error is {'set' if is_error else 'null'}, {sums} is {row[sums]}"
            yield f"row {start + place}: {said}."
        elif not is_error:
            problems = _check_choices(row) if has_choices else _check_text(row)
            yield from (f"row {start + place}: {problem}" for problem in problems)


def _check_text(row: Mapping[str, Any]) -> Iterator[str]:
    if row["num_scored_tokens"] < 1:
        yield f"num_scored_tokens is {row['num_scored_tokens']}."
    yield from _check_sum("loglikelihood", row["loglikelihood"], row.get("logprobs"))


def _check_choices(row: Mapping[str, Any]) -> Iterator[str]:
    sums, lengths = row["choice_loglikelihoods"], row["choice_num_tokens"]
    unequal = {name: v for name, v in row.items() if name[:7] == "choice_" and len(v) != len(sums)}
    for name, values in unequal.items():
        yield f"{name} has {len(values)} entries for {len(sums)} choices."
    if unequal:
        return
    logprobs, first = row.get("logprobs"), 0
    for choice, (value, length) in enumerate(zip(sums, lengths, strict=True)):
        piece = None if logprobs is None else logprobs[first : first + length]
        yield from _check_sum(f"choice_loglikelihoods[{choice}]", value, piece)
        first += length
    scores = Scores(
        tuple(
            Score(value, is_greedy, length, num_bytes, None)
            for value, is_greedy, length, num_bytes in zip(
                sums, row["choice_is_greedy"], lengths, row["choice_num_bytes"], strict=True
            )
        ),
        tuple(row.get("choice_unconditional_loglikelihoods") or ()),
    )
    for way in PREDICTIONS:
        if way in row and row[way] != scores.predicted(way):
            yield f"{way} is {row[way]}, and its numbers say {scores.predicted(way)}."


def _check_sum(name: str, said: float, logprobs: Sequence[float] | None) -> Iterator[str]:
    if logprobs is None:
        return
    found = sum(logprobs)
    if found != said and not abs(found - said) <= _TOLERANCE * max(1.0, abs(said)):
        yield f"logprobs add up to {found}, {name} is {said}."
