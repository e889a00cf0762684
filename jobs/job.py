"""What is asked for: one frozen description of a job, with nothing in it about where it runs."""

from dataclasses import dataclass, field, replace
from typing import Literal

from jobs.errors import SettingError
from jobs.model import ModelRef
from jobs.sampling import Sampling, check_sampling
from jobs.scoring import Scoring

MOST_PROMPT_ALTERNATIVES = 64


@dataclass(frozen=True, slots=True)
class Packing:
    """How rows are grouped. It decides the order of sums, and so the last bits of every number."""

    rows_per_batch: int = 64
    "Rows that run through one generate() call together."
    max_batch_tokens: int = 16_384
    "Most tokens of prompt and answer that a batch may come to hold; a row alone may hold more."
    rows_per_shard: int | None = None
    "Rows of one part. None: from the number of rows, a few batches each."
    schedule: Literal["fixed", "refill"] = "refill"
    """fixed: a batch ends with its longest row.

    refill: a row that ends makes room for the shard's next. With logits or long lists of
    alternatives it is fixed in any case: they are written batch by batch.
    """
    logits_budget_bytes: int = 2**30
    "Most bytes of logits, as float32, and of long lists of alternatives that a worker holds."

    def halved(self, times: int) -> "Packing":
        """The same with smaller batches, for want of memory."""
        return replace(
            self,
            rows_per_batch=max(1, self.rows_per_batch >> times),
            max_batch_tokens=max(1, self.max_batch_tokens >> times),
            logits_budget_bytes=max(1, self.logits_budget_bytes >> times),
        )


@dataclass(frozen=True, slots=True)
class Job:
    """A model to be run over a data set."""

    input: str
    "A Parquet file, a folder of them, or a glob."
    output: str
    "The folder that is to hold the parts."
    model: ModelRef
    sampling: Sampling
    "Without meaning for a job that scores: nothing is drawn."
    scoring: Scoring | None = None
    "What is to be scored. None: rows are answered."
    prompt_column: str | None = None
    token_ids_column: str | None = None
    add_special_tokens: Literal["auto", "yes", "no"] = "auto"
    "auto: as the tokenizer does on its own; templates, which write them out, get none."
    max_model_len: int | None = None
    truncation: Literal["error", "left", "right"] = "error"
    """error: a prompt that leaves no room for an answer is an error row.

    left, right: one that leaves no room for max_new_tokens is cut on that side, and flagged.
    """
    logprobs: int | None = None
    "None: none. 0: of the chosen tokens. K: of the K most likely tokens as well."
    prompt_logprobs: int | None = None
    "The same of the prompt's tokens. K is limited: those of all prompts of a shard are held."
    output_logits: bool = False
    "Of the new tokens, or of those that are scored."
    logits_dtype: Literal["float32", "float16"] = "float32"
    output_format: Literal["parquet", "arrow"] = "parquet"
    keep: tuple[str, ...] | None = None
    "Input columns that the output carries. None: all."
    output_prefix: str = ""
    "Put before the names of our columns, where they would clash with the input's."
    limit: int | None = None
    "Only the first rows of the input."
    packing: Packing = field(default_factory=Packing)

    def __post_init__(self) -> None:
        try:
            check_sampling(self.sampling)
        except (TypeError, ValueError) as error:
            raise SettingError(f"{error}.") from error
        for path in (self.input, self.output):
            if path.encode(errors="ignore").decode() != path:
                raise SettingError(f"{path!r}: the path is no valid UTF-8. Rename it.")
        for name, value, low in self._counts():
            if value is not None and value < low:
                raise SettingError(f"{name} must be at least {low}, got {value}.")
        most = MOST_PROMPT_ALTERNATIVES
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= most:
            raise SettingError(
                f"prompt_logprobs must be between 0 and {most}, got {self.prompt_logprobs}."
            )
        if self.prompt_column is not None and self.token_ids_column is not None:
            raise SettingError(
                "prompt_column and token_ids_column are both given: "
                f"{self.prompt_column!r} and {self.token_ids_column!r}. Give one."
            )

    def _counts(self) -> list[tuple[str, int | None, int]]:
        packing = self.packing
        return [
            ("logprobs", self.logprobs, 0),
            ("limit", self.limit, 0),
            ("max_model_len", self.max_model_len, 2),
            ("threads_per_worker", self.model.threads, 1),
            ("rows_per_batch", packing.rows_per_batch, 1),
            ("max_batch_tokens", packing.max_batch_tokens, 1),
            ("rows_per_shard", packing.rows_per_shard, 1),
            ("logits_budget", packing.logits_budget_bytes, 1),
        ]
