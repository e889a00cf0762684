"""How rows hold what is asked: kinds of prompts, and kinds of what is scored."""

from jobs.kinds import prompts, questions
from jobs.kinds.kind import Kind

KINDS: dict[str, Kind] = {
    "text prompts": prompts.TEXT,
    "token id prompts": prompts.TOKEN_IDS,
}
"Of rows that are answered, by name."

SCORED_KINDS: dict[str, Kind] = {
    "texts": questions.TEXT,
    "continuations": questions.CONTINUATION,
    "choices": questions.CHOICES,
}
"Of rows that are scored, by name."
