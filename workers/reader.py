"""A shard's rows and prompts, read and tokenized: the next shard's while this one is answered."""

import dataclasses
from collections.abc import Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from jobs.kinds import KINDS, SCORED_KINDS
from jobs.lessons import Lessons
from jobs.plan import Plan, Shard
from jobs.prompt import Prompt, read_prompts
from jobs.report import Counts
from jobs.rows import RowReader, Rows
from workers.engine import Engine
from workers.memory import free_memory
from workers.prepare import prepare_prompts
from workers.tally import Clock

_NONE = Lessons()


@dataclass(frozen=True, slots=True)
class Reading:
    """A shard before it is answered."""

    rows: Rows
    prompts: list[Prompt]
    "Those that are to be answered have token ids, or an error if they must not run."
    counts: Counts
    "The seconds that it took."


class ShardReader:
    """Reads one shard at a time, and at most one ahead, in a thread of its own."""

    def __init__(self, plan: Plan, engine: Engine) -> None:
        self._plan = plan
        self._engine = engine
        self._readers = [RowReader(plan.source, plan.input_columns)]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read ahead")
        self._ahead: tuple[Shard, Future[Reading]] | None = None

    def begin(self, shard: Shard) -> None:
        """Begins to read a shard that is likely to be the next."""
        self._ahead = shard, self._thread.submit(self._read, shard, _NONE, _all_places(shard))

    def read(self, shard: Shard, lessons: Lessons, wanted: Set[int]) -> Reading:
        """Reads a shard, or takes what was read ahead of it. What was read of another is dropped.

        What is not wanted is not tokenized, so that a row that cannot even be tokenized can be
        found. Raises InputError if the rows cannot be read.
        """
        ahead, self._ahead = self._ahead, None
        is_plain = lessons == _NONE and wanted == _all_places(shard)
        if ahead is not None:
            # What has not begun waits behind what hangs or is of no more use: it is not waited for.
            has_begun = not ahead[1].cancel()
            # What it raised is dropped as well: beside another shard a thing may fail that does not
            # fail alone, and what is sure to fail fails again now, where it is to blame.
            if has_begun and is_plain and ahead[0] == shard and ahead[1].exception() is None:
                return ahead[1].result()
        ahead = None  # Else its rows would lie beside these.
        if lessons.halvings:
            free_memory()
        return self._read(shard, lessons, wanted)

    def _read(self, shard: Shard, lessons: Lessons, wanted: Set[int]) -> Reading:
        plan, clock = self._plan, Clock()
        with clock.stage("read"):
            rows = self._read_rows(shard)
            prompts = read_prompts(
                (KINDS | SCORED_KINDS)[plan.kind],
                {field: rows.column(name) for field, name in plan.prompt_columns.items()},
                first_row_id=shard.start,
                job_seed=plan.job.sampling.seed,
            )
        for row_id, error in lessons.errors:
            place = row_id - shard.start
            prompts[place] = dataclasses.replace(
                prompts[place], text=None, question=None, error=error
            )
        with clock.stage("tokenize"):
            places = sorted(wanted)
            ready = prepare_prompts(plan, self._engine, [prompts[place] for place in places])
        for place, prompt in zip(places, ready, strict=True):
            prompts[place] = prompt
        return Reading(rows, prompts, clock.counts())

    def _read_rows(self, shard: Shard) -> Rows:
        """Goes forward with the reader that was used last: what it has decoded is at hand.

        It is taken out meanwhile, so that no two threads share it, and put back only if it has
        read all: one that has raised may stand anywhere.
        """
        reader = None
        with suppress(IndexError):
            reader = self._readers.pop()
        reader = reader or RowReader(self._plan.source, self._plan.input_columns)
        rows = reader.read(shard.start, shard.stop)
        self._readers[:] = [reader]
        return rows


def _all_places(shard: Shard) -> set[int]:
    return set(range(shard.num_rows))
