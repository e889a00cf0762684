"""Counting what becomes of a shard: rows, tokens, and seconds by stage."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jobs.completion import Completion
from jobs.plan import Plan
from jobs.report import Counts
from jobs.scoring import PREDICTIONS, Scores


def count_completions(plan: Plan, completions: Sequence[Completion]) -> Counts:
    """Rows, errors and tokens of some completions."""
    answered = [completion for completion in completions if completion.error is None]
    counts = Counts(
        rows=len(completions),
        failed=Counter(c.error.code for c in completions if c.error is not None),
        truncated=sum(completion.truncated for completion in completions),
        prompt_tokens=sum(completion.num_prompt_tokens or 0 for completion in answered),
    )
    if plan.job.scoring is None:
        return counts + _count_answers(plan, answered)
    scores = [completion.scores for completion in answered if completion.scores is not None]
    return counts + _count_scores(scores, has_sums=plan.kind != "choices")


def _count_scores(scores: Sequence[Scores], *, has_sums: bool) -> Counts:
    """Tokens and sums of rows that were scored, or how many of their choices are right."""
    targets = [target for row in scores for target in row.targets]
    counts = Counts(scored_tokens=sum(target.num_tokens for target in targets))
    if has_sums:
        return counts + Counts(
            scored_bytes=sum(target.num_bytes or 0 for target in targets),
            scored_words=sum(target.num_words or 0 for target in targets),
            loglikelihood=sum(target.loglikelihood for target in targets),
            greedy=sum(target.is_greedy for target in targets),
        )
    told = [
        (way, choice == row.label)
        for row in scores
        if row.label is not None
        for way in PREDICTIONS
        if (choice := row.predicted(way)) is not None
    ]
    return counts + Counts(
        labelled=Counter(way for way, _ in told),
        right=Counter(way for way, is_right in told if is_right),
    )


def _count_answers(plan: Plan, answered: Sequence[Completion]) -> Counts:
    lengths = [0 if c.token_ids is None else len(c.token_ids) for c in answered]
    most = plan.sampling.max_new_tokens
    return Counts(
        out_of_room=sum(
            completion.finish_reason == "length" and length < most
            for completion, length in zip(answered, lengths, strict=True)
        ),
        new_tokens=sum(lengths),
    )


class Clock:
    """Wall-clock seconds by stage. Two threads may use it, for different stages."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time that the block takes to a stage."""
        started = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - started  # type: ignore[assignment]

    def counts(self) -> Counts:
        """The seconds, to be added to counts."""
        return Counts(
            read_seconds=self._seconds["read"],
            tokenize_seconds=self._seconds["tokenize"],
            generate_seconds=self._seconds["generate"],
            write_seconds=self._seconds["write"],
            read_wait_seconds=self._seconds["read_wait"],
            write_wait_seconds=self._seconds["write_wait"],
        )
