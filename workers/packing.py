"""Rows of a shard into fixed batches: a pure function of the rows' lengths and the job.

without logits   longest first, so that rows of a batch end together; put in order at the end
with logits      in input order, so that each batch can be written when it ends, while the next
                 one runs
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jobs.job import Packing


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
