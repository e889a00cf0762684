"""A worker: one engine that finishes shard after shard. It reads its rows and writes its parts."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from jobs.completion import Capture, Completion
from jobs.kinds import KINDS
from jobs.parts import PartWriter
from jobs.plan import Plan, Shard
from jobs.prompt import Prompt, read_prompts
from jobs.report import Counts, ShardReport
from jobs.rows import RowReader
from jobs.schema import output_schema, output_table
from workers.complete import failed
from workers.engine import load_engine
from workers.packing import RowSize, pack_rows
from workers.pipeline import PipelineLimits
from workers.prepare import prepare_prompts


class Worker:
    """Answers the rows of shards, one shard at a time."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._reader = RowReader(plan.source, plan.input_columns)
        self._schema = output_schema(plan)

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
            plan.job.model, plan.facts, limits, device=plan.device, dtype=plan.dtype
        )
        self._engine.open()

    def run_shard(self, shard: Shard) -> ShardReport:
        """Answers every row of a shard and writes its part.

        Raises JobError if the input cannot be read or the part cannot be written.
        """
        started = time.perf_counter()
        plan, clock = self._plan, _Clock()
        with clock.stage("read"):
            rows = self._reader.read(shard.start, shard.stop)
            prompts = read_prompts(
                KINDS[plan.kind],
                rows.column(plan.prompt_column),
                first_row_id=shard.start,
                job_seed=plan.job.sampling.seed,
            )
        with clock.stage("tokenize"):
            prompts = prepare_prompts(plan, self._engine, prompts)
        counts, done = Counts(), 0
        with PartWriter(plan.job.output, shard, self._schema, plan.job.output_format) as writer:
            for completions, batch_counts in self._answer(prompts, clock):
                with clock.stage("write"):
                    piece = rows.slice(done, len(completions))
                    writer.append(output_table(plan, self._schema, piece, completions))
                counts += batch_counts + self._count(completions)
                done += len(completions)
                del completions, piece  # Else these logits would lie beside the next batch's.
            assert done == shard.num_rows, f"{done} rows answered of {shard.num_rows}"
            with clock.stage("write"):
                part = writer.commit()
        return ShardReport(shard, part, counts + clock.counts(), time.perf_counter() - started)

    def _answer(
        self, prompts: Sequence[Prompt], clock: "_Clock"
    ) -> Iterator[tuple[list[Completion], Counts]]:
        """Yields completions in row order, in stretches that leave no gap.

        With logits a stretch ends with each batch, so that they can be written and forgotten.
        """
        bulky_bytes = self._plan.bulky_bytes_per_token
        runnable = [place for place, prompt in enumerate(prompts) if prompt.error is None]
        batches = pack_rows(
            [self._size(prompts[place]) for place in runnable],
            self._plan.job.packing,
            bulky_bytes_per_token=bulky_bytes,
        )
        answered: dict[int, Completion] = {}
        counts, start = Counts(), 0
        for batch in batches:
            places = [runnable[number] for number in batch]
            with clock.stage("generate"):
                counts += self._generate(prompts, places, answered)
            if bulky_bytes:
                stop = places[-1] + 1
                yield _stretch(prompts, answered, start, stop), counts
                answered, counts, start = {}, Counts(), stop
        yield _stretch(prompts, answered, start, len(prompts)), counts

    def _generate(
        self, prompts: Sequence[Prompt], places: Sequence[int], answered: dict[int, Completion]
    ) -> Counts:
        """Runs one batch and adds its completions to answered, by place."""
        job = self._plan.job
        completions, num_steps = self._engine.generate(
            [prompts[place] for place in places],
            self._plan.sampling,
            Capture(job.logprobs, job.output_logits),
        )
        answered.update(zip(places, completions, strict=True))
        return Counts(batches=1, slot_steps=num_steps * len(places))

    def _size(self, prompt: Prompt) -> RowSize:
        length = len(prompt.token_ids or ())
        most = min(self._plan.sampling.max_new_tokens, self._plan.max_length - length)
        return RowSize(length, most)

    def _count(self, completions: Sequence[Completion]) -> Counts:
        answered = [completion for completion in completions if completion.error is None]
        lengths = [0 if c.token_ids is None else len(c.token_ids) for c in answered]
        most = self._plan.sampling.max_new_tokens
        return Counts(
            rows=len(completions),
            failed=Counter(c.error.code for c in completions if c.error is not None),
            truncated=sum(completion.truncated for completion in completions),
            out_of_room=sum(
                completion.finish_reason == "length" and length < most
                for completion, length in zip(answered, lengths, strict=True)
            ),
            prompt_tokens=sum(completion.num_prompt_tokens or 0 for completion in answered),
            new_tokens=sum(lengths),
        )


def _stretch(
    prompts: Sequence[Prompt], answered: dict[int, Completion], start: int, stop: int
) -> list[Completion]:
    """Completions of the rows [start, stop), with the rows that could not run among them."""
    stretch = []
    for place in range(start, stop):
        prompt = prompts[place]
        if prompt.error is None:
            stretch.append(answered[place])
        else:
            length = None if prompt.token_ids is None else len(prompt.token_ids)
            stretch.append(failed(prompt, prompt.error, length))
    return stretch


class _Clock:
    """Wall-clock seconds by stage."""

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
        )
