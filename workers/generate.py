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
from workers.endings import Endings
from workers.engine import open_pipeline
from workers.pipeline import BatchPipeline, ClaimedBatch, RowContext
from workers.record import BatchRecord
from workers.turns import Turns

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
        while not batch.done:
            batch.advance()
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
        turns: Turns | None = None,
        caller: str = "GenerateIterator.from_contexts()",
    ) -> Self:
        """Opens a batch of rows that each carry their own sampling, seed and stop ids.

        turns: so many rows are live at a time, and one that ends makes room for the next. None: all
        are live from the first step.
        """
        batch = cls.__new__(cls)
        check_contexts(pipeline, contexts, caller, turns)
        batch._open(pipeline, contexts, capture or Capture(), caller, turns)
        return batch

    def _open(
        self,
        pipeline: BatchPipeline,
        contexts: Sequence[RowContext],
        capture: Capture,
        caller: str,
        turns: Turns | None = None,
    ) -> None:
        check_capture(pipeline, capture, caller)
        self._contexts = contexts
        self._eos_token_ids = pipeline.eos_token_ids
        self._synchronous = not pipeline.overlap_active
        limits = [
            min(pipeline.limits.max_length - len(c.token_ids), c.sampling.max_new_tokens)
            for c in contexts
        ]
        self._endings = Endings([c.sampling for c in contexts], limits, pipeline.eos_token_ids)
        self._record = BatchRecord(capture, limits, pipeline.vocab_size)
        self._finish_reasons: list[FinishReason | None] = [None] * len(contexts)
        self._is_live = np.ones(len(contexts), np.bool_)
        self._claim: ClaimedBatch | None = None
        if contexts:
            self._claim = pipeline.claim(contexts, capture, turns)

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
        return not self._is_live.any()

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
        rows, token_ids = self.advance()
        return {row: [token] for row, token in zip(rows.tolist(), token_ids.tolist(), strict=True)}

    def advance(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The same as arrays: the rows that have a new token, and these tokens."""
        if self._claim is None or self.done:
            raise RuntimeError("GenerateIterator has no live rows to step.")
        output = self._claim.execute()
        self._record.check(output)
        # An overlapping pipeline is one step ahead: it may bring tokens of rows that have ended.
        live = np.flatnonzero(self._is_live[output.rows])
        kept = live[~output.has_nan[live]]
        self._record.append(output, kept)
        rows, token_ids = output.rows[kept], output.token_ids[kept]
        stops = self._endings.stops(rows, token_ids)
        for row in rows[stops].tolist():
            self._finish(row, "stop")
        is_full = self._endings.is_full(rows, self._record.lengths(rows))
        for row in rows[is_full & ~stops].tolist():
            self._finish(row, "length")
        for row in output.rows[live[output.has_nan[live]]].tolist():
            self._finish(row, "error")
        return rows, token_ids

    def remove(self, row: int) -> None:
        """Ends a live row where it is. A row that has ended is left alone.

        Raises IndexError if there is no such row.
        """
        if not 0 <= row < len(self._contexts):
            raise IndexError(f"Row {row} is out of range for {len(self._contexts)} rows.")
        if self._is_live[row]:
            self._finish(row, "abort")

    def close(self) -> None:
        """Releases everything, and lets go of the pipeline. May be called twice."""
        for row in np.flatnonzero(self._is_live).tolist():
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

    def _finish(self, row: int, reason: FinishReason) -> None:
        self._is_live[row] = False
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
