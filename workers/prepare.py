"""From prompts to token ids: tokenizing, cutting, and finding the rows that cannot run.

generate() refuses a whole batch for one bad row, so bad rows are told apart before.
"""

import dataclasses
from collections.abc import Sequence

from jobs.completion import ErrorCode
from jobs.kinds.given import find_stranger, refuse
from jobs.plan import Plan
from jobs.prompt import Prompt
from workers.engine import Engine
from workers.questions import prepare_questions


def prepare_prompts(plan: Plan, engine: Engine, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Gives each prompt its token ids, or an error. In order, one for one."""
    if plan.job.scoring is not None:
        return prepare_questions(plan, engine, prompts)
    texts = [prompt for prompt in prompts if prompt.text is not None]
    encoded: dict[int, tuple[int, ...]] = {}
    if texts:
        token_ids = engine.encode(
            [prompt.text or "" for prompt in texts],
            add_special_tokens=plan.job.add_special_tokens != "no",
        )
        encoded = {p.row_id: tuple(ids) for p, ids in zip(texts, token_ids, strict=True)}
    return [
        _check(
            plan, dataclasses.replace(p, text=None, token_ids=encoded.get(p.row_id, p.token_ids))
        )
        for p in prompts
    ]


def _check(plan: Plan, prompt: Prompt) -> Prompt:
    if prompt.error is not None:
        return prompt
    token_ids = prompt.token_ids or ()
    if not token_ids:
        return _refuse(prompt, "empty_prompt", "The prompt has no tokens.")
    if (error := find_stranger(token_ids, plan.facts.vocab_size)) is not None:
        return dataclasses.replace(prompt, error=error)
    return _fit(plan, prompt, token_ids)


def _fit(plan: Plan, prompt: Prompt, token_ids: tuple[int, ...]) -> Prompt:
    """Refuses a prompt that leaves no room, or cuts it so that the whole answer has room."""
    sampling, max_length = plan.sampling, plan.max_length
    room = max_length - sampling.max_new_tokens
    if plan.job.truncation == "error":
        fewest = sampling.max_new_tokens if sampling.ignore_eos else max(sampling.min_new_tokens, 1)
        if len(token_ids) + fewest <= max_length:
            return prompt
        return _refuse(
            prompt,
            "context_length_exceeded",
            f"The prompt has {len(token_ids)} tokens and needs room for {fewest} more; a row may "
            f"hold {max_length}.",
        )
    if len(token_ids) <= room:
        return prompt
    before, after = _added(plan)
    bare = token_ids[len(before) : len(token_ids) - len(after)]
    length = max(room - len(before) - len(after), 1)  # At least one token of its own.
    kept = bare[-length:] if plan.job.truncation == "left" else bare[:length]
    return dataclasses.replace(prompt, token_ids=(*before, *kept, *after), truncated=True)


def _added(plan: Plan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer has put before and after the text of each prompt."""
    return plan.added_token_ids if plan.reads_text else ((), ())


def _refuse(prompt: Prompt, code: ErrorCode, message: str) -> Prompt:
    return dataclasses.replace(prompt, error=refuse(code, message))
