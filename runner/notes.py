"""What nobody asked for and yet decides what comes out, in sentences."""

from collections.abc import Sequence

from jobs.plan import Plan


def describe_plan(plan: Plan) -> tuple[str, ...]:
    """The sentences that stand at the start of a run and in its manifest."""
    said = _of_answers(plan) if plan.job.scoring is None else _of_scores(plan)
    return (*plan.facts.notes, *said, *_of_text(plan))


def _of_answers(plan: Plan) -> list[str]:
    notes, sampling = [], plan.sampling
    taken = [name for name, origin in plan.origins.items() if origin == "model"]
    if taken:
        values = ", ".join(f"{name} {getattr(sampling, name):g}" for name in taken)
        notes.append(f"From the model's generation config: {values}.")
    endings = sorted({*plan.facts.eos_token_ids, *sampling.stop_token_ids})
    if sampling.ignore_eos or not endings:
        notes.append("No token ends a row.")
    else:
        notes.append(f"A row ends with {_tokens(endings)}.")
    return notes


def _of_scores(plan: Plan) -> list[str]:
    columns = ", ".join(map(repr, plan.prompt_columns.values()))
    first = plan.facts.first_token_id
    begins = "nothing, so its first token is not scored" if first is None else f"token {first}"
    notes = [f"Rows are {plan.kind}, in {columns}."]
    if plan.kind == "texts" and plan.reads_text:
        notes.append(f"What precedes a text is {begins}.")
    if plan.kind == "texts":
        notes.append(f"Texts beyond {plan.max_length:,} tokens are scored in windows of so many.")
    elif first is not None:
        notes.append(f"An empty context is {begins}.")
    return notes


def _of_text(plan: Plan) -> list[str]:
    if not plan.reads_text or plan.kind == "texts":
        return []
    before, after = plan.added_token_ids
    what, added = ("text", before + after) if plan.job.scoring is None else ("context", before)
    said = _tokens(added) if added else "nothing"
    return [f"The tokenizer adds {said} to a {what}."]


def _tokens(token_ids: Sequence[int]) -> str:
    return f"token{'s' * (len(token_ids) > 1)} {', '.join(map(str, token_ids))}"
