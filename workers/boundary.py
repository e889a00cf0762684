"""Where a context ends and what is scored begins, and long texts in windows.

The rules are those of lm-evaluation-harness, so that its numbers are ours: white space at the end
of a context belongs to what follows, both are tokenized together, and the cut is as far from the
start as the context alone is long.
"""

from collections.abc import Callable, Sequence

from jobs.scoring import ScoreRequest

Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"Token ids of texts, without special tokens."


def split_pairs(
    encode: Encode, pairs: Sequence[tuple[str, str]], *, moves_space: bool = True
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Token ids of each context and of its continuation.

    moves_space: not where a chat template has set the end of the context.
    A context without tokens is (): what is to stand before the continuation is the caller's matter.
    A continuation comes out as () if a token of the context has taken it in.
    """
    moved = [_move_space(*pair) for pair in pairs] if moves_space else pairs
    texts = list(dict.fromkeys(text for a, b in moved for text in (a, a + b)))
    token_ids = {text: tuple(ids) for text, ids in zip(texts, encode(texts), strict=True)}
    cut = []
    for context, continuation in moved:
        before, whole = token_ids[context], token_ids[context + continuation]
        cut.append((before, whole[len(before) :]))
    return cut


def _move_space(context: str, continuation: str) -> tuple[str, str]:
    bare = context.rstrip()
    return bare, context[len(bare) :] + continuation


def cut_windows(
    token_ids: Sequence[int], first_ids: Sequence[int], max_length: int
) -> list[ScoreRequest]:
    """Requests that score each token once, in order.

    first_ids: what stands before a text, such as BOS; without, the first token is not scored.
    max_length: tokens that a pass may run. All windows but the last are full of tokens that are
    scored behind one of context; the last has as much context as fits.
    """
    whole = (*first_ids, *token_ids)
    start = max(len(first_ids), 1)
    requests = []
    while start < len(whole):
        stop = min(start + max_length, len(whole))
        begin = max(0, stop - max_length - 1)
        requests.append(ScoreRequest(whole[begin:stop], start - begin))
        start = stop
    return requests
