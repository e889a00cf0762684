"""score(): how likely are tokens that are given?

    from workers.generate import open_pipeline
    from workers.score import score

    pipeline = open_pipeline("demo")
    question = [504, 3575, 282, 4649, 314]  # The capital of France is
    [paris] = score(pipeline, [[*question, 7042]], num_context=5)
    paris.loglikelihood, paris.is_greedy  # -0.2581, True

Nothing is generated, and no tensor has the size of tokens times vocabulary. Rows that begin alike
run what they share once, so that the choices of a question cost little more than one of them.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import SupportsIndex

from jobs.sampling import as_integer
from jobs.scoring import ScoreRequest
from workers.arguments import Rows, check_ids, read_rows
from workers.pipeline import BatchPipeline, ScoringPipeline, TokenScores

__all__ = ["TokenScores", "score"]


def score(
    pipeline: BatchPipeline | ScoringPipeline,
    input_ids: Rows,
    *,
    num_context: SupportsIndex | Sequence[SupportsIndex] = 1,
    output_logprobs: SupportsIndex = 0,
) -> list[TokenScores]:
    """Scores the tokens of each row behind its context, in one call of any number of rows.

    input_ids: rows of token ids, context and continuation together.
    num_context: tokens of each row that are not scored, one number for all or one a row; at least
        1, since nothing precedes a row's first token.
    output_logprobs: the K most likely tokens at each place, too.

    Returns the scores of each row, in input order. Their numbers are of the raw logits of the whole
    vocabulary, in nats, and equal those of the row alone but for the noise of float32 sums.
    Raises TypeError or ValueError for what cannot be scored, before anything is run.
    """
    if not isinstance(pipeline, ScoringPipeline):
        raise ValueError("score: the pipeline's engine scores nothing. Open it with another engine")
    try:
        num_top = as_integer("output_logprobs", output_logprobs)
        if not 0 <= num_top <= pipeline.vocab_size:
            raise ValueError(
                f"output_logprobs must be between 0 and {pipeline.vocab_size}, got {num_top}"
            )
        rows = read_rows("input_ids", input_ids)
        if isinstance(num_context, SupportsIndex):
            contexts = list(repeat(as_integer("num_context", num_context), len(rows)))
        else:
            contexts = [as_integer("an entry of num_context", number) for number in num_context]
        if len(contexts) != len(rows):
            raise ValueError(
                f"num_context has {len(contexts)} entries for {len(rows)} rows. They must agree"
            )
        requests = [ScoreRequest(*pair) for pair in zip(rows, contexts, strict=True)]
        for row, request in enumerate(requests):
            _check(pipeline, row, request)
    except (TypeError, ValueError) as error:
        raise type(error)(f"score: {error}") from error
    return pipeline.score(requests, num_top)


def _check(pipeline: ScoringPipeline, row: int, request: ScoreRequest) -> None:
    length, max_length = len(request.token_ids), pipeline.limits.max_length
    if request.num_context < 1:
        raise ValueError(
            f"row {row} has a context of {request.num_context} tokens, and the first scored token "
            "must follow one. Put the token that begins a text before it"
        )
    if length <= request.num_context:
        raise ValueError(
            f"row {row} has {length} tokens, of which {request.num_context} are context: none is "
            "left to be scored. Give it a continuation"
        )
    # The last token is not run, so it needs no room.
    if length > max_length + 1:
        raise ValueError(
            f"row {row} has {length} tokens, but the pipeline was opened for rows of "
            f"{max_length}. Shorten it, or open with a larger max_length"
        )
    check_ids(f"row {row}", request.token_ids, pipeline.vocab_size)
