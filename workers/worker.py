"""A worker: one engine that finishes shard after shard. It reads its rows and writes its parts."""

import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from jobs.claim import check_owner
from jobs.completion import Capture, Completion
from jobs.drafts import PartWriter
from jobs.lessons import Lessons
from jobs.mend import OldPart, completed_rows, open_old_part
from jobs.plan import Plan, Shard
from jobs.prompt import Prompt
from jobs.records import drop_record, read_record, write_record
from jobs.report import Counts, ShardReport
from jobs.rows import Rows
from jobs.schema import output_schema
from workers.behind import WriteBehind
from workers.complete import failed, refusals
from workers.engine import load_engine
from workers.memory import free_memory, is_out_of_memory, memory_explained, row_too_big
from workers.packing import find_turns, pack_shard
from workers.pipeline import PipelineLimits
from workers.reader import ShardReader
from workers.tally import Clock, count_completions
from workers.turns import Turns

_NONE = Lessons()


class Worker:
    """Answers the rows of shards, one shard at a time."""

    def __init__(self, plan: Plan, run_id: str | None = None) -> None:
        """run_id: the run that must own the output folder whenever a part gets its name."""
        self._plan = plan
        self._run_id = run_id
        self._schema = output_schema(plan)
        self._behind = WriteBehind()

    def open(self) -> None:
        """Loads the model. Raises ModelError if it cannot be loaded or run."""
        plan, packing = self._plan, self._plan.job.packing
        # Sums are grouped by thread, so the job says how many there are, not the machine.
        torch.set_num_threads(plan.job.model.threads)
        limits = PipelineLimits(
            max_batch_size=packing.rows_per_batch,
            max_length=plan.max_length,
            max_prefill_tokens=max(packing.max_batch_tokens, plan.max_length),
        )
        engine_class = load_engine(plan.job.model.engine)
        self._engine = engine_class(
            plan.job.model,
            plan.facts,
            limits,
            device=plan.device,
            dtype=plan.dtype,
            kernels=plan.kernels,
        )
        self._engine.open()
        self._reader = ShardReader(plan, self._engine)

    def run_shard(
        self, shard: Shard, lessons: Lessons = _NONE, ahead: Shard | None = None
    ) -> ShardReport:
        """Answers every row of a shard and writes its part.

        ahead: the shard that is likely to be the next. It is read meanwhile, and what goes wrong
        with it is not said before it is run itself.
        Raises MemoryShortError if batches must be smaller; another JobError if the input cannot be
        read or the part cannot be written.
        """
        with memory_explained(shard):
            return self._write(shard, lessons, None, ahead)

    def retry_shard(self, shard: Shard, lessons: Lessons = _NONE) -> ShardReport:
        """Answers again the rows of a finished part whose error may pass. All others stay."""
        with memory_explained(shard):
            return self._write(shard, lessons, open_old_part(self._plan, shard))

    def try_rows(
        self, shard: Shard, start: int, stop: int, lessons: Lessons = _NONE, *, retry: bool = False
    ) -> None:
        """Answers the rows [start, stop) of a shard and keeps nothing: can it be done at all?

        retry: only those of a finished part whose error may pass.
        """
        with memory_explained(shard):
            old = open_old_part(self._plan, shard) if retry else None
            wanted = set(range(start - shard.start, stop - shard.start)) & _places(shard, old)
            prompts = self._reader.read(shard, lessons, wanted).prompts
            for _ in self._answer(prompts, wanted, lessons, Clock()):
                pass

    def answer_again(self, shard: Shard, row_ids: set[int]) -> tuple[dict[int, Completion], Rows]:
        """Answers rows of a finished shard in the batches that they were in; writes nothing.

        Rows that were mended are left out: their batches were others. Also returns the input.
        """
        record = read_record(self._plan.job.output, shard)
        assert record is not None, f"shard {shard.index} has no record"
        row_ids = row_ids - set(record.mended)
        everything = set(range(shard.num_rows))
        found: dict[int, Completion] = {}
        with memory_explained(shard):
            reading = self._reader.read(shard, record.lessons, everything)
            prompts, answered = reading.prompts, refusals(reading.prompts, everything)
            for places in [[], *pack_shard(self._plan, prompts, everything, record.lessons)]:
                if row_ids & {prompts[place].row_id for place in places}:
                    self._generate(prompts, places, answered, record.lessons)
                found |= {c.row_id: c for c in answered.values() if c.row_id in row_ids}
                answered = {}
        return found, reading.rows

    def _write(
        self, shard: Shard, lessons: Lessons, old: OldPart | None, ahead: Shard | None = None
    ) -> ShardReport:
        started = time.perf_counter()
        plan, clock = self._plan, Clock()
        folder, places = plan.job.output, _places(shard, old)
        with clock.stage("read_wait"):
            reading = self._reader.read(shard, lessons, places)
        if ahead is not None:
            self._reader.begin(ahead)
        counts, done, retryable = Counts(halved=int(lessons.halvings > 0)), 0, 0
        with (
            PartWriter(folder, shard, self._schema, plan.job.output_format) as writer,
            self._behind.settled(clock),
        ):
            for stretch, batch_counts in self._answer(reading.prompts, places, lessons, clock):
                answered = [completion for completion in stretch if completion is not None]
                counts += batch_counts + count_completions(plan, answered)
                retryable += sum(c.error is not None and c.error.retryable for c in answered)
                piece = reading.rows.slice(done, len(stretch))
                done += len(stretch)
                encode = partial(completed_rows, plan, self._schema, piece, stretch, old)
                self._behind.append(writer, encode)
                del stretch, answered, piece, encode  # Else they would be held once written.
                if not plan.is_written_behind or lessons.halvings:
                    self._behind.finish()
            self._behind.finish()
            assert done == shard.num_rows, f"{done} rows answered of {shard.num_rows}"
            with clock.stage("write"), clock.stage("write_wait"):
                part = writer.finish()
            counts += reading.counts + clock.counts()
            seconds = time.perf_counter() - started
            report = ShardReport(shard, part, counts, seconds, lessons, retryable)
            if old is not None:
                report = old.mended_report(report)
            if self._run_id is not None:
                check_owner(folder, self._run_id)
            drop_record(folder, shard)
            writer.commit()
            write_record(folder, report)
        return report

    def _answer(
        self, prompts: Sequence[Prompt], wanted: set[int], lessons: Lessons, clock: Clock
    ) -> Iterator[tuple[list[Completion | None], Counts]]:
        """Yields completions in row order, in stretches that leave no gap; None where none is due.

        With logits a stretch ends with each batch, so that they can be written and forgotten.
        """
        answered = refusals(prompts, wanted)
        is_bulky = self._plan.bulky_bytes_per_token > 0
        most = self._plan.job.packing.rows_per_batch if is_bulky else max(len(prompts), 1)
        counts, start = Counts(), 0
        for places in [*pack_shard(self._plan, prompts, wanted, lessons), None]:
            if places is not None:
                with clock.stage("generate"):
                    counts += self._generate(prompts, places, answered, lessons)
            stop = len(prompts) if places is None else places[-1] + 1 if is_bulky else start
            for first in range(start, stop, most):
                stretch = range(first, min(first + most, stop))
                yield [answered.pop(place, None) for place in stretch], counts
                counts = Counts()
            start = stop

    def _generate(
        self,
        prompts: Sequence[Prompt],
        places: Sequence[int],
        answered: dict[int, Completion],
        lessons: Lessons,
    ) -> Counts:
        """Runs one batch and adds its completions to answered, by place."""
        batch = [prompts[place] for place in places]
        try:
            completions, slot_steps = self._run_beside(batch, find_turns(self._plan, lessons))
        except Exception as error:
            if len(places) > 1 or not is_out_of_memory(error):
                raise
            completions = [failed(batch[0], row_too_big(), len(batch[0].token_ids or ()))]
            slot_steps = 0
        answered.update(zip(places, completions, strict=True))
        return Counts(batches=1, slot_steps=slot_steps)

    def _run_beside(
        self, batch: Sequence[Prompt], turns: Turns | None
    ) -> tuple[list[Completion], int]:
        if self._behind.is_busy:
            try:
                return self._run(batch, turns)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            self._behind.finish()  # What is being written holds memory that the batch may need.
            free_memory()
        return self._run(batch, turns)

    def _run(self, batch: Sequence[Prompt], turns: Turns | None) -> tuple[list[Completion], int]:
        job, sampling = self._plan.job, self._plan.sampling
        if job.scoring is not None:
            capture = Capture(0 if job.scoring.token_logprobs else None, job.output_logits)
            return self._engine.score(batch, capture), 0
        capture = Capture(job.logprobs, job.output_logits, job.prompt_logprobs)
        return self._engine.generate(batch, sampling, capture, turns)


def _places(shard: Shard, old: OldPart | None) -> set[int]:
    """Places of the shard's rows that are to be answered."""
    return set(range(shard.num_rows) if old is None else old.retried)
