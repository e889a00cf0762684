"""One row, ready to be answered."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs.completion import RowError
from jobs.sampling import row_seed
from jobs.scoring import Inquiry, Question

if TYPE_CHECKING:  # generate() runs without Arrow.
    import pyarrow as pa

    from jobs.kinds.kind import Kind


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row's prompt: text until it is tokenized, token ids after, or an error instead of both.

    A row that is scored has a question until it is tokenized, and after that an inquiry; its token
    ids are those of the context.
    """

    row_id: int
    seed: int
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    question: Question | None = None
    inquiry: Inquiry | None = None
    truncated: bool = False
    error: RowError | None = None


def read_prompts(
    kind: "Kind",
    columns: "Mapping[str, pa.ChunkedArray]",
    *,
    first_row_id: int,
    job_seed: int,
) -> list[Prompt]:
    """Makes a prompt of each row, in order. columns: by the job's field that names them."""
    prompts = []
    for row_id, value in enumerate(kind.read(columns), start=first_row_id):
        prompts.append(
            Prompt(
                row_id,
                row_seed(job_seed, row_id),
                text=value if isinstance(value, str) else None,
                token_ids=value if isinstance(value, tuple) else None,
                question=value if isinstance(value, Question) else None,
                error=value if isinstance(value, RowError) else None,
            )
        )
    return prompts
