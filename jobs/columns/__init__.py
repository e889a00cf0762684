"""How completions become columns of a part: one file a column, or a few that belong together."""

from jobs.columns import (
    choices,
    context,
    ending,
    error,
    logits,
    logprobs,
    prompt_logprobs,
    row,
    scores,
    text,
    token_scores,
    tokens,
)
from jobs.columns.column import Column

COLUMNS: dict[str, Column] = {
    "row": row.COLUMN,
    "text": text.COLUMN,
    "tokens": tokens.COLUMN,
    "ending": ending.COLUMN,
    "logprobs": logprobs.COLUMN,
    "prompt_logprobs": prompt_logprobs.COLUMN,
    "logits": logits.COLUMN,
    "error": error.COLUMN,
}
"In the order of the part; the input's own columns stand after the first."

SCORE_COLUMNS: dict[str, Column] = {
    "row": row.COLUMN,
    "scores": scores.COLUMN,
    "choices": choices.COLUMN,
    "context": context.COLUMN,
    "token_scores": token_scores.COLUMN,
    "logits": logits.COLUMN,
    "error": error.COLUMN,
}
"The same for a job that scores."
