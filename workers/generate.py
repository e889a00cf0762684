"""generate(): a fixed batch of prompts, run as one batch, one forward pass a step.

    from workers.generate import generate, open_pipeline

    pipeline = open_pipeline("demo", max_batch_size=8, max_length=512)
    result = generate(pipeline, [[504, 3575, 282, 4649, 314]], max_new_tokens=16)

Same name, arguments, defaults and meaning as Modular MAX's max.pipelines.lib.generate. It goes
further in that any number of log-probabilities can be had, each row says why it ended, and rows
made by from_contexts have their own sampling and seed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, SupportsIndex

import numpy as np
import numpy.typing as npt

from jobs.completion import Capture, FinishReason
from jobs.sampling import Sampling
from workers.arguments import Rows, check_capture, check_contexts, read_capture, read_contexts
from workers.engine import open_pipeline
from workers.pipeline import BatchPipeline, ClaimedBatch, RowContext, StepOutput
from workers.record import BatchRecord

__all__ = [
    "BatchPipeline",
    "GenerateIterator",
    "GenerateResult",
    "LogProbs",
    "generate",
    "open_pipeline",
]


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Log-probabilities of one row's new tokens, in nats.

    Of the whole vocabulary after penalties and the min_new_tokens mask, before temperature and
    filters.
    """

    token_log_probabilities: list[float]
    "Of each new token."
    sampled_token_ids: list[int]
    "The new tokens."
    top_log_probabilities: list[dict[int, float]]
    "At each step the most likely tokens, best first, and the sampled one if it is not of them."


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """What generate() returns, each list in input order."""

    sequences: list[list[int]]
    "Each row's prompt followed by its new tokens."
    logits: list[npt.NDArray[np.float32]] | None
    "[new tokens, V] a row: raw model output, before penalties, masks, temperature and filters."
    log_probs: list[LogProbs] | None
    finish_reasons: list[FinishReason]
    "Why each row ended; error means that the model's logits were no numbers."


def generate(
    pipeline: BatchPipeline,
    input_ids: Rows,
    attention_mask: Rows | None = None,
    *,
    max_new_tokens: int,
    min_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    repetition_penalty: float | None = None,
    ignore_eos: bool = False,
    stop_token_ids: Iterable[int] | None = None,
    seed: int | None = 0,
    output_logits: bool = False,
    output_logprobs: SupportsIndex | Literal["chosen"] = 0,
    caller: str = "generate()",
) -> GenerateResult:
    """Generates tokens for a fixed batch of prompts, run as one batch.

    Sampling values left at None come from the model's generation config, and else change nothing:
    temperature 1 over the whole vocabulary, with seed 0. A row ends with EOS or a stop id, which is
    its last token, after max_new_tokens, or where the pipeline's max_length is reached.

    attention_mask: zeros drop entries of input_ids, anywhere in a row.
    temperature: 0 takes the most likely token, the lowest id among equals. top_k: -1 or 0 for off.
    stop_token_ids: added to EOS, never in its place.
    ignore_eos: every row runs to max_new_tokens, whatever it yields, stop ids included.
    seed: of row 0, any integer modulo 2**64; row i draws from seed + i * 2**32.
    output_logits: keeps 4 * V bytes a new token.
    output_logprobs: how many alternatives, up to V; 0 for none at all; "chosen" for those of the
    new tokens alone.
    caller: what errors name.

    Raises TypeError if input_ids or attention_mask is no list of integer lists, or a value is of
    the wrong kind; ValueError if a value is out of range, or the batch does not fit the pipeline;
    RuntimeError if the pipeline overlaps its steps and another batch is open, or if it returns
    log-probabilities or logits that do not line up one for each token.
    """
    with GenerateIterator(
        pipeline,
        input_ids,
        attention_mask,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        ignore_eos=ignore_eos,
        stop_token_ids=stop_token_ids,
        seed=seed,
        output_logits=output_logits,
        output_logprobs=output_logprobs,
        caller=caller,
    ) as batch:
        for _ in batch:
            pass
        return batch.result()


class GenerateIterator:
    """A batch that is generated step by step.

    with GenerateIterator(pipeline, [[1, 2, 3]], max_new_tokens=8) as batch:
        for new_tokens in batch:
            print(new_tokens)   # {row: [token]}
    """

    def __init__(
        self,
        pipeline: BatchPipeline,
        input_ids: Rows,
        attention_mask: Rows | None = None,
        *,
        max_new_tokens: int,
        min_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        frequency_penalty: float | None = None,
        presence_penalty: float | None = None,
        repetition_penalty: float | None = None,
        ignore_eos: bool = False,
        stop_token_ids: Iterable[int] | None = None,
        seed: int | None = 0,
        output_logits: bool = False,
        output_logprobs: SupportsIndex | Literal["chosen"] = 0,
        caller: str = "GenerateIterator()",
    ) -> None:
        """Takes what generate() takes, and claims the pipeline's cache for every row."""
        sampling = Sampling(
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            repetition_penalty=repetition_penalty,
            ignore_eos=ignore_eos,
            stop_token_ids=() if stop_token_ids is None else stop_token_ids,  # type: ignore[arg-type]
            seed=0 if seed is None else seed,
        )
        contexts = read_contexts(pipeline, input_ids, attention_mask, sampling, caller)
        check_contexts(pipeline, contexts, caller)
        self._open(pipeline, contexts, read_capture(output_logits, output_logprobs, caller), caller)

    @classmethod
    def from_contexts(
        cls,
        pipeline: BatchPipeline,
        contexts: Sequence[RowContext],
        *,
        capture: Capture | None = None,
        caller: str = "GenerateIterator.from_contexts()",
    ) -> Self:
        """Opens a batch of rows that each carry their own sampling, seed and stop ids."""
        batch = cls.__new__(cls)
        check_contexts(pipeline, contexts, caller)
        batch._open(pipeline, contexts, capture or Capture(), caller)
        return batch

    def _open(
        self,
        pipeline: BatchPipeline,
        contexts: Sequence[RowContext],
        capture: Capture,
        caller: str,
    ) -> None:
        check_capture(pipeline, capture, caller)
        self._contexts = contexts
        self._eos_token_ids = pipeline.eos_token_ids
        self._synchronous = not pipeline.overlap_active
        self._limits = [
            min(pipeline.limits.max_length - len(c.token_ids), c.sampling.max_new_tokens)
            for c in contexts
        ]
        self._record = BatchRecord(capture, self._limits, pipeline.vocab_size)
        self._finish_reasons: list[FinishReason | None] = [None] * len(contexts)
        self._live = set(range(len(contexts)))
        self._claim: ClaimedBatch | None = pipeline.claim(contexts, capture) if contexts else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[int, list[int]]:
        if self.done:
            raise StopIteration
        return self.step()

    @property
    def done(self) -> bool:
        """True if no row is live."""
        return not self._live

    @property
    def synchronous(self) -> bool:
        """True if each step returns the tokens that it computed itself."""
        return self._synchronous

    @property
    def sequences(self) -> list[list[int]]:
        """Each row's prompt followed by its new tokens so far."""
        return [
            [*context.token_ids, *self._record.token_ids(row).tolist()]
            for row, context in enumerate(self._contexts)
        ]

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        """Why each row ended; None while it is live."""
        return list(self._finish_reasons)

    @property
    def logits(self) -> list[npt.NDArray[np.float32]]:
        """[new tokens, V] a row, raw. Raises RuntimeError if the batch does not record them."""
        if not self._record.capture.logits:
            raise RuntimeError("this batch records no logits. Build it with output_logits=True")
        return [self._record.logits(row) for row in range(len(self._contexts))]

    @property
    def log_probs(self) -> list[LogProbs]:
        """Log-probabilities a row. Raises RuntimeError if the batch does not record them."""
        if self._record.capture.logprobs is None:
            raise RuntimeError(
                "this batch records no log-probabilities. Build it with output_logprobs > 0"
            )
        return [self._log_probs(row) for row in range(len(self._contexts))]

    @property
    def record(self) -> BatchRecord:
        """The same as arrays, for those who write them to columns."""
        return self._record

    def stop_reason(self, row: int) -> str | None:
        """The stop id that ended a row; None for EOS and for every other end."""
        if self._finish_reasons[row] != "stop":
            return None
        last = int(self._record.token_ids(row)[-1])
        return None if last in self._eos_token_ids else str(last)

    def step(self) -> dict[int, list[int]]:
        """Runs one forward pass over the live rows and returns the new tokens of each.

        Rows that end with it are released before it returns. Raises RuntimeError if no row is live.
        """
        if self._claim is None or not self._live:
            raise RuntimeError("GenerateIterator has no live rows to step.")
        output = self._claim.execute()
        self._record.check(output)
        return {row: [token_id] for row, token_id in self._take(output)}

    def remove(self, row: int) -> None:
        """Ends a live row where it is. A row that has ended is left alone.

        Raises IndexError if there is no such row.
        """
        if not 0 <= row < len(self._contexts):
            raise IndexError(f"Row {row} is out of range for {len(self._contexts)} rows.")
        if row in self._live:
            self._finish(row, "abort")

    def close(self) -> None:
        """Releases everything, and lets go of the pipeline. May be called twice."""
        for row in sorted(self._live):
            self._finish(row, "abort")
        self._claim = None

    def result(self) -> GenerateResult:
        """What generate() returns. Rows that are still live count as aborted."""
        capture = self._record.capture
        return GenerateResult(
            sequences=self.sequences,
            logits=self.logits if capture.logits else None,
            log_probs=self.log_probs if capture.logprobs is not None else None,
            finish_reasons=[reason or "abort" for reason in self._finish_reasons],
        )

    def _take(self, output: StepOutput) -> list[tuple[int, int]]:
        """Records the tokens of live rows, and ends the rows that they end."""
        steps = list(zip(output.rows.tolist(), output.token_ids.tolist(), strict=True))
        # An overlapping pipeline is one step ahead: it may bring tokens of rows that have ended.
        live = [place for place, (row, _) in enumerate(steps) if row in self._live]
        kept = [place for place in live if not output.has_nan[place]]
        self._record.append(output, kept)
        for place in kept:
            self._finish_if_over(*steps[place])
        for place in set(live) - set(kept):
            self._finish(steps[place][0], "error")
        return [steps[place] for place in kept]

    def _finish_if_over(self, row: int, token_id: int) -> None:
        sampling = self._contexts[row].sampling
        ends = token_id in self._eos_token_ids or token_id in sampling.stop_token_ids
        if ends and not sampling.ignore_eos:
            self._finish(row, "stop")
        elif self._record.num_tokens(row) >= self._limits[row]:
            self._finish(row, "length")

    def _finish(self, row: int, reason: FinishReason) -> None:
        self._live.discard(row)
        self._finish_reasons[row] = reason
        if self._claim is not None:
            self._claim.release(row)

    def _log_probs(self, row: int) -> LogProbs:
        token_ids = self._record.token_ids(row).tolist()
        logprobs = self._record.logprobs(row).tolist()
        top_ids, top_logprobs = self._record.top_ids(row), self._record.top_logprobs(row)
        tops: list[dict[int, float]] = []
        for step, token_id in enumerate(token_ids):
            top = dict(zip(top_ids[step].tolist(), top_logprobs[step].tolist(), strict=True))
            top.setdefault(token_id, logprobs[step])
            tops.append(top)
        return LogProbs(logprobs, token_ids, tops)
