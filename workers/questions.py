"""From questions to token ids: boundaries, windows, and rows that cannot be scored told apart."""

import dataclasses
from collections.abc import Sequence

from jobs.completion import RowError
from jobs.kinds.given import find_stranger, refuse
from jobs.plan import Plan
from jobs.prompt import Prompt
from jobs.scoring import Chat, Given, Inquiry, Question, ScoreRequest, Target
from workers.boundary import cut_windows, split_pairs
from workers.engine import Engine

Ids = tuple[int, ...]


def prepare_questions(plan: Plan, engine: Engine, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Gives each prompt that has a question its inquiry, or an error. In order, one for one."""
    reader = _Tokenizer(engine, [p.question for p in prompts if p.question is not None])
    return [prompt if prompt.question is None else _ask(plan, reader, prompt) for prompt in prompts]


class _Tokenizer:
    """Token ids of what questions hold, each text tokenized and each chat rendered once."""

    def __init__(self, engine: Engine, questions: Sequence[Question]) -> None:
        pairs = dict.fromkeys(
            (context, target)
            for question in questions
            for target in question.targets
            if isinstance(target, str)
            for context in ["" if question.context is None else question.context]
            if isinstance(context, str)
        )

        def encode(texts: Sequence[str]) -> list[list[int]]:
            return engine.encode(texts, add_special_tokens=False)

        self._encode = encode
        # Without a text there may be no tokenizer.
        split = split_pairs(encode, list(pairs)) if pairs else []
        self._pairs: dict[tuple[str | Chat, str], tuple[Ids, Ids]] = {}
        self._pairs.update(zip(pairs, split, strict=True))
        self._texts: dict[Chat, str | RowError] = {}
        for question in questions:
            if isinstance(question.context, Chat) and question.context not in self._texts:
                self._texts[question.context] = _render(engine, question.context)

    def why_not(self, question: Question) -> RowError | None:
        """Why a question cannot be tokenized."""
        context = question.context
        text = self._texts[context] if isinstance(context, Chat) else None
        return text if isinstance(text, RowError) else None

    def split(self, context: Given | Chat, target: Given) -> tuple[Ids, Ids]:
        """Token ids of a context and of what follows it."""
        if isinstance(context, Chat):
            text = self._texts[context]
            assert isinstance(text, str), "the chat could not be rendered"
            if not isinstance(target, str):
                return self._alone(text), target
            [pair] = split_pairs(self._encode, [(text, target)], moves_space=False)
            return pair
        if isinstance(context, str) and isinstance(target, str):
            return self._pairs[context, target]
        return self._alone(context), self._alone(target)

    def _alone(self, given: Given) -> Ids:
        if not isinstance(given, str):
            return given
        return tuple(self._encode([given])[0]) if given else ()


def _render(engine: Engine, chat: Chat) -> str | RowError:
    try:
        return engine.render(chat.messages)
    except ValueError as error:
        return refuse("template_error", f"The chat template cannot be applied: {error}")


def _ask(plan: Plan, tokenizer: _Tokenizer, prompt: Prompt) -> Prompt:
    question = prompt.question
    assert question is not None
    bare = dataclasses.replace(prompt, question=None)
    if (reason := tokenizer.why_not(question)) is not None:
        return dataclasses.replace(bare, error=reason)
    context_given: Given | Chat = "" if question.context is None else question.context
    split = [tokenizer.split(context_given, target) for target in question.targets]
    for ids in (ids for pair in split for ids in pair):
        if (error := find_stranger(ids, plan.facts.vocab_size)) is not None:
            return dataclasses.replace(bare, error=error)
    if question.context is None:
        return _ask_text(plan, bare, question, split[0][1])
    return _ask_targets(plan, bare, question, split)


def _ask_text(plan: Plan, prompt: Prompt, question: Question, token_ids: Ids) -> Prompt:
    """Each token once, in windows. Token ids are taken as they are: nothing is put before them."""
    first = _begin(plan) if isinstance(question.targets[0], str) else ()
    requests = cut_windows(token_ids, first, plan.max_length)
    if not requests:
        return dataclasses.replace(
            prompt, error=refuse("empty_prompt", "The text has no token that could be scored.")
        )
    inquiry = Inquiry((_target(question.targets[0], requests),))
    ready = dataclasses.replace(prompt, token_ids=first or token_ids[:1], inquiry=inquiry)
    return _check_logits(plan, ready, inquiry)


def _ask_targets(
    plan: Plan, prompt: Prompt, question: Question, split: Sequence[tuple[Ids, Ids]]
) -> Prompt:
    contexts, continuations = zip(*split, strict=True)
    for place, continuation in enumerate(continuations):
        if not continuation:
            which = f"choice at place {place}" if plan.kind == "choices" else "continuation"
            said = f"The {which} has no token of its own: one of the context's has taken it in."
            return dataclasses.replace(prompt, error=refuse("empty_continuation", said))
    before = plan.added_token_ids[0] if isinstance(question.context, str) else ()
    context = (*before, *contexts[0]) if contexts[0] else _begin(plan)
    if not context:
        said = "The context is empty, and the model has neither BOS nor EOS to stand for it."
        return dataclasses.replace(prompt, error=refuse("empty_prompt", said))
    # The last token is not run, so it needs no room.
    room = plan.max_length + 1 - max(map(len, continuations))
    fitted = _fit(plan, context, len(before), room)
    if isinstance(fitted, RowError):
        return dataclasses.replace(prompt, token_ids=context, error=fitted)

    def targets_behind(start: Ids) -> tuple[Target, ...]:
        return tuple(
            _target(given, [ScoreRequest((*start, *ids), len(start))])
            for given, ids in zip(question.targets, continuations, strict=True)
        )

    is_pmi = plan.job.scoring is not None and plan.job.scoring.pmi
    unconditional = targets_behind(_begin(plan)) if is_pmi else ()
    inquiry = Inquiry(targets_behind(fitted), unconditional, question.label)
    is_cut = len(fitted) < len(context)
    ready = dataclasses.replace(prompt, token_ids=fitted, inquiry=inquiry, truncated=is_cut)
    return _check_logits(plan, ready, inquiry)


def _check_logits(plan: Plan, prompt: Prompt, inquiry: Inquiry) -> Prompt:
    """Refuses a row whose logits alone are more than a worker may hold of a batch."""
    budget = plan.batch_packing(0).logits_budget_bytes
    num_tokens = sum(request.num_scored for request in inquiry.requests)
    size = num_tokens * plan.bulky_bytes_per_token
    if size <= budget:
        return prompt
    total = plan.job.packing.logits_budget_bytes
    said = (
        f"The row's logits take {num_tokens} tokens x {plan.bulky_bytes_per_token:,} bytes = "
        f"{size:,} bytes, and {budget:,} of the logits budget of {total:,} are a batch's. Raise "
        "--logits-budget, or leave logits out."
    )
    return dataclasses.replace(prompt, error=refuse("out_of_memory", said))


def _fit(plan: Plan, context: Ids, num_added: int, room: int) -> Ids | RowError:
    """The context, cut to the room that what follows leaves, if it may be cut."""
    if len(context) <= room:
        return context
    if plan.job.truncation == "error" or room <= num_added:
        said = (
            f"The context has {len(context)} tokens, and what follows leaves room for {room}; a "
            f"pass may hold {plan.max_length}."
        )
        return refuse("context_length_exceeded", said)
    before, own = context[:num_added], context[num_added:]
    length = room - num_added
    return (*before, *(own[-length:] if plan.job.truncation == "left" else own[:length]))


def _begin(plan: Plan) -> Ids:
    """What stands before a text that nothing precedes."""
    first = plan.facts.first_token_id
    return plan.added_token_ids[0] or (() if first is None else (first,))


def _target(given: Given, requests: Sequence[ScoreRequest]) -> Target:
    if not isinstance(given, str):
        return Target(tuple(requests))
    return Target(tuple(requests), len(given.encode()), len(given.split()))
