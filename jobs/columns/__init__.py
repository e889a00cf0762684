"""How completions become columns of a part: one file a column, or a few that belong together."""

from jobs.columns import ending, error, logits, logprobs, row, text, tokens
from jobs.columns.column import Column

COLUMNS: dict[str, Column] = {
    "row": row.COLUMN,
    "text": text.COLUMN,
    "tokens": tokens.COLUMN,
    "ending": ending.COLUMN,
    "logprobs": logprobs.COLUMN,
    "logits": logits.COLUMN,
    "error": error.COLUMN,
}
"In the order of the part; the input's own columns stand after the first."
