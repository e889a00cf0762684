"""A job settled against its input and its model, and the cutting of rows into shards."""

import math
from dataclasses import dataclass, replace

from jobs.files import RowSource
from jobs.job import Job, Packing
from jobs.model import ModelFacts
from jobs.sampling import Origin, RowSampling

BATCHES_PER_SHARD = 16
"Ends of shards cost a little idle time, so big inputs get big shards."
SHARDS_WANTED = 64
"Enough that a few workers end together; small inputs get shards of one batch."
FEW_ALTERNATIVES = 64
"Lists of alternatives up to this length are small beside everything else."


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows [start, stop), which one worker finishes in one go."""

    index: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """How many rows the shard holds."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a worker needs to know: what was asked, with nothing left open."""

    job: Job
    source: RowSource
    facts: ModelFacts
    sampling: RowSampling
    origins: dict[str, Origin]
    "Who chose each sampling value."
    kind: str
    "Name of the entry of KINDS or SCORED_KINDS that reads the rows."
    prompt_columns: dict[str, str]
    "What it reads: by the job's field that names a column, the column."
    reads_text: bool
    "True if one of them holds text, so that a tokenizer is needed."
    kept_columns: tuple[str, ...]
    max_length: int
    "Most tokens a row may hold: the model's, or less if the job says so."
    num_rows: int
    rows_per_shard: int
    device: str
    dtype: str
    kernels: str
    "compiled or torch: what computes attention."
    notes: tuple[str, ...]
    "What nobody asked for and yet decides what comes out, in sentences."

    @property
    def bulky_bytes_per_token(self) -> int:
        """Bytes of logits and long lists of alternatives of each new token; 0 if there are none."""
        return bulky_bytes_per_token(self.job, self.facts.vocab_size)

    @property
    def is_written_behind(self) -> bool:
        """True if a batch's logits are written while the next runs: the budget holds two rows."""
        row_bytes = self.sampling.max_new_tokens * self.bulky_bytes_per_token
        return 0 < 2 * row_bytes <= self.job.packing.logits_budget_bytes

    def batch_packing(self, halvings: int) -> Packing:
        """How rows are grouped into batches, which were halved so often for want of memory."""
        packing = self.job.packing.halved(halvings)
        if not self.is_written_behind:
            return packing
        half = max(1, packing.logits_budget_bytes // 2)  # The other is for what is written.
        return replace(packing, logits_budget_bytes=half)

    @property
    def added_token_ids(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the tokenizer puts before and after each text."""
        return ((), ()) if self.job.add_special_tokens == "no" else self.facts.added_token_ids

    @property
    def input_columns(self) -> list[str]:
        """Columns that are read: those that are kept, and those of the prompt."""
        return list(dict.fromkeys([*self.kept_columns, *self.prompt_columns.values()]))

    @property
    def shards(self) -> list[Shard]:
        """The shards, in row order; one empty shard if there are no rows."""
        return plan_shards(self.num_rows, self.rows_per_shard)


def plan_shards(num_rows: int, rows_per_shard: int) -> list[Shard]:
    """Cuts rows into shards of equal size but for the last. No rows make one empty shard.

    The empty one is there so that an empty input yields a part with the full schema.
    """
    starts = range(0, max(num_rows, 1), rows_per_shard)
    return [
        Shard(index, start, min(start + rows_per_shard, num_rows))
        for index, start in enumerate(starts)
    ]


def bulky_bytes_per_token(job: Job, vocab_size: int) -> int:
    """Bytes of logits, and of long lists of alternatives, that come with each new token.

    Where there are any, a worker holds those of the batch that runs and of the one that is written,
    and no more. Short lists do not count: a whole shard of them is small.
    """
    alternatives = job.logprobs or 0
    return 4 * vocab_size * job.output_logits + 8 * alternatives * (alternatives > FEW_ALTERNATIVES)


def settle_rows_per_shard(job: Job, num_rows: int, bulky_bytes_per_row: int) -> int:
    """Chooses the shard size from what is asked and how many rows there are, never from workers.

    Workers come and go; the cut into shards, and with it every byte, must not follow them.
    """
    packing = job.packing
    if packing.rows_per_shard is not None:
        return packing.rows_per_shard
    batches = math.ceil(num_rows / (SHARDS_WANTED * packing.rows_per_batch))
    rows = packing.rows_per_batch * min(max(batches, 1), BATCHES_PER_SHARD)
    is_long = job.output_logits if job.scoring is not None else bool(job.prompt_logprobs)
    if is_long:  # Much is held of each token of what is given, and how long that is is not known.
        rows = min(rows, packing.rows_per_batch)
    if bulky_bytes_per_row:
        rows = min(rows, max(1, packing.logits_budget_bytes // bulky_bytes_per_row))
    return rows
