"""Rows of a shard into fixed batches: a pure function of the rows' lengths and the job.

fixed    longest first, so that rows of a batch end together; put in order at the end
refill   longest first too, and all in one batch, in which rows take turns
logits   in input order, so that each batch can be written when it ends, while the next one runs
scores   all in one, so that what rows share is run once
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jobs.job import Packing
from jobs.lessons import Lessons
from jobs.plan import Plan
from jobs.prompt import Prompt
from jobs.scoring import Inquiry
from workers.turns import Turns


@dataclass(frozen=True, slots=True)
class RowSize:
    """What a row takes."""

    num_prompt_tokens: int
    max_new_tokens: int
    "Most tokens that it can still get."

    @property
    def num_tokens(self) -> int:
        """Tokens of keys and values that the row may come to hold."""
        return self.num_prompt_tokens + self.max_new_tokens


def pack_shard(
    plan: Plan, prompts: Sequence[Prompt], wanted: set[int], lessons: Lessons
) -> list[list[int]]:
    """Batches of the places in prompts that are wanted and can be run."""
    runnable = [place for place in sorted(wanted) if prompts[place].error is None]
    if plan.job.scoring is not None:
        inquiries = [prompts[place].inquiry or Inquiry(()) for place in runnable]
        cut = _pack_inquiries(plan, inquiries, lessons.halvings)
        return [[runnable[number] for number in batch] for batch in cut]
    lengths = [len(prompts[place].token_ids or ()) for place in runnable]
    most = plan.sampling.max_new_tokens
    batches = pack_rows(
        [RowSize(length, min(most, plan.max_length - length)) for length in lengths],
        plan.batch_packing(lessons.halvings),
        bulky_bytes_per_token=plan.bulky_bytes_per_token,
    )
    return [[runnable[number] for number in batch] for batch in batches]


def _pack_inquiries(plan: Plan, inquiries: Sequence[Inquiry], halvings: int) -> list[list[int]]:
    packing = plan.batch_packing(halvings)
    if plan.bulky_bytes_per_token:
        sizes = [
            RowSize(0, sum(request.num_scored for request in inquiry.requests))
            for inquiry in inquiries
        ]
        return pack_rows(sizes, packing, bulky_bytes_per_token=plan.bulky_bytes_per_token)
    most = packing.rows_per_batch if halvings else max(len(inquiries), 1)
    places = range(len(inquiries))
    return [list(places[start : start + most]) for start in places[::most]]


def find_turns(plan: Plan, lessons: Lessons) -> Turns | None:
    """How rows of a shard take turns in one batch; None where they are cut into batches."""
    packing = plan.batch_packing(lessons.halvings)
    if not _takes_turns(packing, plan.bulky_bytes_per_token):
        return None
    return Turns(packing.rows_per_batch, packing.max_batch_tokens)


def pack_rows(
    sizes: Sequence[RowSize], packing: Packing, *, bulky_bytes_per_token: int = 0
) -> list[list[int]]:
    """Cuts rows into batches and returns, for each batch, the rows' places in sizes.

    bulky_bytes_per_token: 0 if neither logits nor long lists of alternatives are kept. A row alone
    makes a batch, whatever its size: rows that do not fit at all are refused before.
    """
    order: Iterable[int] = range(len(sizes))
    if not bulky_bytes_per_token:
        order = sorted(order, key=lambda place: (-sizes[place].num_tokens, place))
    if _takes_turns(packing, bulky_bytes_per_token):
        return [list(order)] if sizes else []
    batches: list[list[int]] = []
    num_tokens = bulky_bytes = 0
    for place in order:
        size = sizes[place]
        new_bytes = size.max_new_tokens * bulky_bytes_per_token
        is_full = (
            not batches
            or len(batches[-1]) == packing.rows_per_batch
            or num_tokens + size.num_tokens > packing.max_batch_tokens
            or bulky_bytes + new_bytes > packing.logits_budget_bytes
        )
        if is_full:
            batches.append([])
            num_tokens = bulky_bytes = 0
        batches[-1].append(place)
        num_tokens += size.num_tokens
        bulky_bytes += new_bytes
    return batches


def _takes_turns(packing: Packing, bulky_bytes_per_token: int) -> bool:
    # A row at a time is a batch by itself: it may turn out to be more than the memory holds.
    return packing.schedule == "refill" and not bulky_bytes_per_token and packing.rows_per_batch > 1
