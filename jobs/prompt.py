"""One row, ready to be answered."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs.completion import RowError
from jobs.sampling import row_seed

if TYPE_CHECKING:  # generate() runs without Arrow.
    import pyarrow as pa

    from jobs.kinds.kind import Kind


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row's prompt: text until it is tokenized, token ids after, or an error instead of both."""

    row_id: int
    seed: int
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    truncated: bool = False
    error: RowError | None = None


def read_prompts(
    kind: "Kind", column: "pa.ChunkedArray", *, first_row_id: int, job_seed: int
) -> list[Prompt]:
    """Makes a prompt of each cell of a column, in order."""
    prompts = []
    for row_id, value in enumerate(kind.read(column), start=first_row_id):
        prompts.append(
            Prompt(
                row_id,
                row_seed(job_seed, row_id),
                text=value if isinstance(value, str) else None,
                token_ids=value if isinstance(value, tuple) else None,
                error=value if isinstance(value, RowError) else None,
            )
        )
    return prompts
