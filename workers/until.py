"""Texts continued as evaluations ask: settings by name, and rows that end with strings."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from jobs.errors import ModelError
from jobs.job import Packing
from jobs.sampling import RowSampling, Sampling, SamplingDefaults, check_sampling, resolve_sampling
from workers.generate import GenerateIterator
from workers.pipeline import BatchPipeline, RowContext
from workers.turns import Turns

Decode = Callable[[Sequence[int]], str]

_ROWS_AT_A_TIME = 1024
"Penalties keep memory for each row of a batch, live or waiting."
_KNOWN = {
    "temperature", "top_k", "top_p", "min_p", "min_new_tokens", "repetition_penalty",
    "frequency_penalty", "presence_penalty",
}  # fmt: skip
"Settings that mean here what they mean elsewhere."


def generate_until(
    pipeline: BatchPipeline,
    rows: Sequence[RowContext],
    stops: Sequence[Sequence[str]],
    decode: Decode,
) -> Iterator[tuple[int, list[int]]]:
    """Yields the place of each row and its new tokens when it ends, and another has its room.

    stops: strings that end each row, beside EOS and its length; the last token may reach beyond.

    Raises ModelError if logits are not finite.
    """
    turns = Turns(pipeline.limits.max_batch_size, Packing().max_batch_tokens)
    # A token is a byte or more. One more token: decoders may drop a space before the first.
    tails = [max((len(stop.encode()) for stop in its), default=0) + 1 for its in stops]

    def has_stop(place: int, token_ids: list[int]) -> bool:
        # The whole text is decoded only to confirm: with each token it would take ever longer.
        parts = (token_ids[-tails[place] :], token_ids)
        return all(any(map(decode(part).__contains__, stops[place])) for part in parts)

    order = sorted(range(len(rows)), key=lambda place: -len(rows[place].token_ids))
    for start in range(0, len(order), _ROWS_AT_A_TIME):
        places = order[start : start + _ROWS_AT_A_TIME]
        taken = [rows[place] for place in places]
        with GenerateIterator.from_contexts(pipeline, taken, turns=turns) as batch:
            while not batch.done:
                stepped = batch.advance()[0].tolist()
                reasons = batch.finish_reasons
                if "error" in reasons:
                    raise ModelError("The model's logits are not finite: it has no answers.")
                for row in stepped:
                    token_ids = batch.record.token_ids(row).tolist()
                    if reasons[row] or has_stop(places[row], token_ids):
                        batch.remove(row)
                        yield places[row], token_ids


def settle_settings(
    settings: Mapping[str, object], max_new_tokens: int, defaults: SamplingDefaults
) -> RowSampling:
    """How a row is drawn by settings in transformers' names; without do_sample nothing is drawn.

    Raises ValueError for what has no meaning here.
    """
    asked = {name: value for name, value in settings.items() if name != "do_sample"}
    if not settings.get("do_sample"):
        asked["temperature"] = 0.0
    if asked.get("num_beams") == 1:
        del asked["num_beams"]
    if unknown := sorted(set(asked) - _KNOWN):
        raise ValueError(
            f"generation settings {', '.join(unknown)} have no meaning here. Known are do_sample, "
            f"{', '.join(sorted(_KNOWN))}"
        )
    sampling = Sampling(max_new_tokens, **asked)  # type: ignore[arg-type]  # Checked in the next line.
    check_sampling(sampling)
    return resolve_sampling(sampling, defaults)[0]
