"""What a job that scores is asked for, and what a row of it holds before and after it is scored."""

import math
from dataclasses import dataclass

Given = str | tuple[int, ...]
"Text, or token ids."


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, which the model's chat template makes a text of."""

    messages: tuple[tuple[str, str], ...]
    "Role and content of each, in order."


@dataclass(frozen=True, slots=True)
class Scoring:
    """How likely is what the rows hold? Columns that are not named are found by their names."""

    text_column: str | None = None
    context_column: str | None = None
    continuation_column: str | None = None
    choices_column: str | None = None
    label_column: str | None = None
    "Which choice is right: its number from 0, or the choice itself."
    pmi: bool = False
    "Scores choices without their context, too: pointwise mutual information is the difference."
    token_logprobs: bool = False
    "Keeps the log-probability of each scored token."


@dataclass(frozen=True, slots=True)
class Question:
    """A row as it was given: what is scored, and what stands before it."""

    targets: tuple[Given, ...]
    "The text, the continuation, or the choices."
    context: Given | Chat | None = None
    """None: a text, which begins as the model's texts begin.

    What follows a conversation is the assistant's turn.
    """
    label: int | None = None
    "Which target is right; None if that is not known."


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Tokens that are given: how likely are those behind the context?"""

    token_ids: tuple[int, ...]
    num_context: int
    "Tokens at the beginning that are not scored; at least 1, since the first follows nothing."

    @property
    def scored_ids(self) -> tuple[int, ...]:
        """The tokens behind the context."""
        return self.token_ids[self.num_context :]

    @property
    def num_scored(self) -> int:
        """How many they are."""
        return len(self.token_ids) - self.num_context


@dataclass(frozen=True, slots=True)
class Target:
    """What is scored as one, in token ids: more than one request if it is cut into windows."""

    requests: tuple[ScoreRequest, ...]
    num_bytes: int | None = None
    "Of its UTF-8, if it was given as text."
    num_words: int | None = None
    "Stretches without white space, if it was given as text."

    @property
    def num_tokens(self) -> int:
        """Tokens that are scored."""
        return sum(request.num_scored for request in self.requests)


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A question in token ids."""

    targets: tuple[Target, ...]
    unconditional: tuple[Target, ...] = ()
    "The same targets without their context, where that is asked for."
    label: int | None = None

    @property
    def requests(self) -> list[ScoreRequest]:
        """All that is to be run, in order."""
        targets = (*self.targets, *self.unconditional)
        return [request for target in targets for request in target.requests]

    @property
    def num_tokens(self) -> int:
        """Tokens that are scored behind their context."""
        return sum(target.num_tokens for target in self.targets)


@dataclass(frozen=True, slots=True)
class Score:
    """What has come of a target."""

    loglikelihood: float
    "Sum of the log-probabilities of its tokens, in nats."
    is_greedy: bool
    "True if greedy decoding would write it."
    num_tokens: int
    num_bytes: int | None
    num_words: int | None


SUMS = ("loglikelihood", "choice_loglikelihoods", "choice_unconditional_loglikelihoods")
"Columns of sums of log-probabilities."

PREDICTIONS = {
    "predicted_choice": "greatest log-likelihood",
    "predicted_choice_per_token": "greatest log-likelihood per token",
    "predicted_choice_per_byte": "greatest log-likelihood per byte",
    "predicted_choice_pmi": "greatest gain of its log-likelihood from the context",
}
"Ways to tell which choice is the likeliest, by the name of their column."


@dataclass(frozen=True, slots=True)
class Scores:
    """What has come of a row that was scored."""

    targets: tuple[Score, ...]
    unconditional: tuple[float, ...] = ()
    "Log-likelihoods of the same targets without their context, in nats."
    label: int | None = None

    def predicted(self, way: str) -> int | None:
        """The likeliest target, the first of equals. way: of PREDICTIONS.

        None if that cannot be told: no bytes of token ids, nothing unconditional.
        """
        sums = [target.loglikelihood for target in self.targets]
        sizes: list[int | None] = [1 for _ in self.targets]
        if way == "predicted_choice_per_token":
            sizes = [target.num_tokens for target in self.targets]
        elif way == "predicted_choice_per_byte":
            sizes = [target.num_bytes for target in self.targets]
        elif way == "predicted_choice_pmi":
            if not self.unconditional:
                return None
            sums = [a - b for a, b in zip(sums, self.unconditional, strict=True)]
        values = [value / size for value, size in zip(sums, sizes, strict=True) if size]
        # Any number is greater than what is none: minus infinity without minus infinity.
        ranks = [-math.inf if math.isnan(value) else value for value in values]
        return ranks.index(max(ranks)) if len(ranks) == len(sums) else None
