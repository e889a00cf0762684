"""What a whole set's scores say of the model: perplexity, and accuracy on choices."""

import math

from jobs.report import Counts
from jobs.scoring import PREDICTIONS


def measure(kind: str, counts: Counts) -> dict[str, float]:
    """Figures by name, those alone that the counts allow. kind: of SCORED_KINDS, else none follow.

    perplexity: of a token; word_perplexity and byte_perplexity: the same sum over all words or
    bytes. bits_per_byte: its base 2 logarithm. greedy_share: rows that greedy decoding would write.
    accuracy: the labelled choice is the likeliest; with its standard error, of a mean of n rows.
    """
    if kind == "choices":
        return _accuracies(counts)
    if kind not in ("texts", "continuations") or not counts.scored_tokens:
        return {}
    found = {"perplexity": _perplexity(counts, counts.scored_tokens)}
    if counts.scored_words:
        found["word_perplexity"] = _perplexity(counts, counts.scored_words)
    if counts.scored_bytes:
        found["byte_perplexity"] = _perplexity(counts, counts.scored_bytes)
        found["bits_per_byte"] = -counts.loglikelihood / counts.scored_bytes / math.log(2)
    if kind == "continuations":
        found["greedy_share"] = counts.greedy / (counts.rows - counts.failed_rows)
    return found


def _perplexity(counts: Counts, number: int) -> float:
    try:
        return math.exp(-counts.loglikelihood / number)
    except OverflowError:
        return math.inf


def _accuracies(counts: Counts) -> dict[str, float]:
    found = {}
    for way in PREDICTIONS:
        number = counts.labelled[way]
        if not number:
            continue
        share = counts.right[way] / number
        name = way.replace("predicted_choice", "accuracy")
        found[name] = share
        if number > 1:
            found[f"{name}_stderr"] = math.sqrt(share * (1 - share) / (number - 1))
    return found
