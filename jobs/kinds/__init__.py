"""How a row becomes a prompt: one file a kind, each listed here."""

from jobs.kinds import text, token_ids
from jobs.kinds.kind import Kind

KINDS: dict[str, Kind] = {
    "prompt_column": text.KIND,
    "token_ids_column": token_ids.KIND,
}
"By the job's field that names the kind's column."
