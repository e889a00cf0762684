"""A batch of prompts through a BatchPipeline: what the engines with a pipeline have in common."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from jobs.completion import Capture, Completion, PromptScores, RowError
from jobs.prompt import Prompt
from jobs.sampling import RowSampling
from jobs.scoring import Inquiry, Score, ScoreRequest, Scores
from workers.generate import GenerateIterator
from workers.pipeline import BatchPipeline, RowContext, ScoringPipeline, TokenScores
from workers.turns import Turns

Decode = Callable[[Sequence[Sequence[int]]], list[str | None]]


def complete_batch(
    pipeline: BatchPipeline,
    prompts: Sequence[Prompt],
    sampling: RowSampling,
    capture: Capture,
    decode: Decode,
    turns: Turns | None = None,
) -> tuple[list[Completion], int]:
    """Runs prompts as one batch. Returns a completion each, in order, and places times steps.

    Places are the rows that were live when others last came in: those that end leave theirs empty.

    turns: how many rows are live at a time. None: all.
    """
    contexts = []
    for prompt in prompts:
        assert prompt.token_ids is not None, f"row {prompt.row_id} has no token ids"
        contexts.append(RowContext(prompt.token_ids, sampling, prompt.seed))
    slot_steps = num_places = num_live = 0
    with GenerateIterator.from_contexts(pipeline, contexts, capture=capture, turns=turns) as batch:
        while not batch.done:
            num_before, num_live = num_live, len(batch.advance()[0])
            num_places = num_live if num_live > num_before else num_places
            slot_steps += num_places
        texts = decode([batch.record.token_ids(row).tolist() for row in range(len(prompts))])
        completions = [
            _complete(batch, row, prompt, texts[row]) for row, prompt in enumerate(prompts)
        ]
    if capture.prompt_logprobs is not None:
        completions = _with_prompts(pipeline, prompts, completions, capture.prompt_logprobs)
    return completions, slot_steps


def _with_prompts(
    pipeline: BatchPipeline,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    num_top: int,
) -> list[Completion]:
    """Completions with what their prompts' own tokens score: prompts are run once more."""
    assert isinstance(pipeline, ScoringPipeline), "the engine scores nothing"
    ids = [prompt.token_ids or () for prompt in prompts]
    places = [place for place, row in enumerate(ids) if len(row) > 1]
    found = pipeline.score([ScoreRequest(ids[place], 1) for place in places], num_top)
    scores = dict(zip(places, found, strict=True))
    done = []
    for place, completion in enumerate(completions):
        score = scores.get(place)
        if completion.error is None and score is not None and np.isnan(score.logprobs).any():
            message = "The logits of the prompt are not finite."
            error = RowError("generate", "nan_logits", message)
            completion = failed(prompts[place], error, completion.num_prompt_tokens)
        if completion.error is None:
            token_ids = np.array(ids[place], np.int32)
            completion = replace(completion, prompt_scores=_as_prompt(token_ids, score, num_top))
        done.append(completion)
    return done


def _as_prompt(
    token_ids: npt.NDArray[np.int32], score: TokenScores | None, num_top: int
) -> PromptScores:
    """score: None of a prompt of one token, which follows nothing."""
    if score is None:
        none = np.empty((0, num_top), np.float32)
        return PromptScores(token_ids, np.empty(0, np.float32), none.astype(np.int32), none)
    top_ids = score.top_ids.astype(np.int32)
    return PromptScores(token_ids, score.logprobs, top_ids, score.top_logprobs)


def _complete(batch: GenerateIterator, row: int, prompt: Prompt, text: str | None) -> Completion:
    record, reason = batch.record, batch.finish_reasons[row]
    assert reason is not None, f"row {prompt.row_id} is still live"
    num_prompt_tokens = len(prompt.token_ids or ())
    if reason == "error":
        return failed(prompt, _nan_error(record.num_tokens(row)), num_prompt_tokens)
    has_logprobs = record.capture.logprobs is not None
    has_alternatives = bool(record.capture.logprobs)
    return Completion(
        row_id=prompt.row_id,
        seed=prompt.seed,
        finish_reason=reason,
        stop_reason=batch.stop_reason(row),
        num_prompt_tokens=num_prompt_tokens,
        truncated=prompt.truncated,
        token_ids=record.token_ids(row),
        text=text,
        logprobs=record.logprobs(row) if has_logprobs else None,
        top_ids=record.top_ids(row) if has_alternatives else None,
        top_logprobs=record.top_logprobs(row) if has_alternatives else None,
        logits=record.logits(row) if record.capture.logits else None,
    )


def score_batch(
    pipeline: ScoringPipeline, prompts: Sequence[Prompt], capture: Capture
) -> list[Completion]:
    """Scores prompts that have an inquiry, in one call. Returns a completion each, in order."""
    inquiries = []
    for prompt in prompts:
        assert prompt.inquiry is not None, f"row {prompt.row_id} asks for nothing"
        inquiries.append(prompt.inquiry)
    requests = [request for inquiry in inquiries for request in inquiry.requests]
    # What a row has taken is held by it alone, since logits are large.
    found = deque(pipeline.score(requests, 0, keeps_logits=capture.logits))
    return [
        _complete_scores(prompt, inquiry, capture, found)
        for prompt, inquiry in zip(prompts, inquiries, strict=True)
    ]


def _complete_scores(
    prompt: Prompt, inquiry: Inquiry, capture: Capture, found: deque[TokenScores]
) -> Completion:
    """Takes the row's scores from those that are found, in the order of its requests."""
    targets = [[found.popleft() for _ in target.requests] for target in inquiry.targets]
    others = [[found.popleft() for _ in target.requests] for target in inquiry.unconditional]
    parts = [part for target in targets for part in target]
    num_prompt_tokens = len(prompt.token_ids or ())
    if any(np.isnan(part.logprobs).any() for target in targets + others for part in target):
        message = "The logits of a token that is scored are not finite."
        return failed(prompt, RowError("generate", "nan_logits", message), num_prompt_tokens)
    has_tokens = capture.logprobs is not None
    ids = [token_id for t in inquiry.targets for r in t.requests for token_id in r.scored_ids]
    return Completion(
        row_id=prompt.row_id,
        seed=prompt.seed,
        finish_reason=None,
        num_prompt_tokens=num_prompt_tokens,
        truncated=prompt.truncated,
        token_ids=np.array(ids, np.int32) if has_tokens else None,
        logprobs=np.concatenate([part.logprobs for part in parts]) if has_tokens else None,
        logits=_joined([part.logits for part in parts]) if capture.logits else None,
        scores=Scores(
            targets=tuple(
                Score(
                    loglikelihood=_sum(scores),
                    is_greedy=all(part.is_greedy for part in scores),
                    num_tokens=target.num_tokens,
                    num_bytes=target.num_bytes,
                    num_words=target.num_words,
                )
                for target, scores in zip(inquiry.targets, targets, strict=True)
            ),
            unconditional=tuple(map(_sum, others)),
            label=inquiry.label,
        ),
    )


def _sum(scores: Sequence[TokenScores]) -> float:
    return float(sum(part.loglikelihood for part in scores))


def _joined(logits: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """One after the other; one alone is handed on where it lies."""
    return logits[0] if len(logits) == 1 else np.concatenate(logits)


def failed(prompt: Prompt, error: RowError, num_prompt_tokens: int | None = None) -> Completion:
    """The completion of a row that cannot be answered."""
    return Completion(
        row_id=prompt.row_id,
        seed=prompt.seed,
        finish_reason="error",
        num_prompt_tokens=num_prompt_tokens,
        truncated=prompt.truncated,
        error=error,
    )


def refusals(prompts: Sequence[Prompt], places: Iterable[int]) -> dict[int, Completion]:
    """Completions of those prompts that have an error instead of token ids, by place."""
    return {
        place: failed(prompt, prompt.error, None if ids is None else len(ids))
        for place in places
        if (prompt := prompts[place]).error is not None
        for ids in [prompt.token_ids]
    }


def _nan_error(num_tokens: int) -> RowError:
    message = f"The logits of new token {num_tokens} are not finite."
    return RowError("generate", "nan_logits", message)
