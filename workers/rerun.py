"""Answering rows of a finished output once more, in the batches that they were in."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from jobs.plan import Plan
from jobs.repeat import Repeat, compare_rows
from workers.worker import Worker


def rerun_rows(plan: Plan, row_ids: Sequence[int]) -> Iterator[Repeat]:
    """Answers rows again, in this process, and compares each with its part. row_ids: ascending.

    Raises ModelError if the model cannot be loaded; InputError if the input cannot be read.
    """
    worker = Worker(plan)
    worker.open()
    for index, ids in groupby(row_ids, key=lambda row_id: row_id // plan.rows_per_shard):
        shard = plan.shards[index]
        completions, rows = worker.answer_again(shard, set(ids))
        yield from compare_rows(plan, shard, completions, rows)
