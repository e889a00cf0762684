"""What becomes of a prompt: a completion, or the reason why there is none."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from jobs.scoring import Scores

FinishReason = Literal["stop", "length", "abort", "error"]
"""stop: EOS or a stop id; length: no room for more tokens; abort: removed; error: see the error."""

ErrorCode = Literal[
    "null_prompt",
    "empty_prompt",
    "wrong_type",
    "context_length_exceeded",
    "empty_continuation",
    "empty_choices",
    "invalid_label",
    "invalid_messages",
    "template_error",
    "invalid_token_id",
    "nan_logits",
    "out_of_memory",
    "worker_crash",
    "engine_error",
]


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a row has no answer."""

    stage: Literal["read", "prompt", "generate"]
    "How far the row came."
    code: ErrorCode
    message: str
    attempts: int = 1
    retryable: bool = False
    "True if chance was at work, so that another attempt may succeed."


@dataclass(frozen=True, slots=True)
class Capture:
    """What an engine is to keep beside the tokens."""

    logprobs: int | None = None
    "None: none. 0: of the chosen tokens alone. K: of the K most likely tokens as well."
    logits: bool = False
    prompt_logprobs: int | None = None
    "The same as logprobs, of the prompt's own tokens."


@dataclass(frozen=True, slots=True)
class PromptScores:
    """How likely a prompt of P tokens is, from its second token on."""

    token_ids: npt.NDArray[np.int32]
    "[P]"
    logprobs: npt.NDArray[np.float32]
    "[P-1], nats."
    top_ids: npt.NDArray[np.int32]
    "[P-1, K], most likely first."
    top_logprobs: npt.NDArray[np.float32]
    "[P-1, K], nats."


@dataclass(frozen=True, slots=True)
class Completion:
    """The outcome of one row. T new tokens, K alternatives, V words in the vocabulary.

    Of a row that was scored, the T tokens are those that were scored, all targets' one after the
    other.
    """

    row_id: int
    seed: int
    finish_reason: FinishReason | None
    "None for a row that was scored: nothing was generated."
    stop_reason: str | None = None
    "The stop id that ended the row; None for EOS and for every other end."
    num_prompt_tokens: int | None = None
    truncated: bool = False
    "True if the prompt was cut to fit."
    token_ids: npt.NDArray[np.int32] | None = None
    "[T], the last one being the token that ended the row."
    text: str | None = None
    logprobs: npt.NDArray[np.float32] | None = None
    "[T], nats."
    top_ids: npt.NDArray[np.int32] | None = None
    "[T, K], most likely first."
    top_logprobs: npt.NDArray[np.float32] | None = None
    "[T, K], nats."
    prompt_scores: "PromptScores | None" = None
    logits: npt.NDArray[np.float32] | None = None
    "[T, V], raw: before penalties, masks and temperature."
    scores: Scores | None = None
    error: RowError | None = None
