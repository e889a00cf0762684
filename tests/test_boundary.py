"""Where contexts end, and windows of long texts, by hand."""

import numpy as np
import pytest

from workers.boundary import cut_windows, split_pairs


def by_character(texts):  # type: ignore[no-untyped-def]
    return [[ord(c) for c in text] for text in texts]


def by_pairs(texts):  # type: ignore[no-untyped-def]
    """Two characters are one token, so that a token can reach over a boundary."""
    return [[hash(text[i : i + 2]) for i in range(0, len(text), 2)] for text in texts]


def test_white_space_at_the_end_of_a_context_belongs_to_what_follows() -> None:
    [(context, continuation)] = split_pairs(by_character, [("Question: \n", "yes")])

    assert bytes(context).decode() == "Question:"
    assert bytes(continuation).decode() == " \nyes"


def test_a_context_of_white_space_has_no_tokens() -> None:
    assert split_pairs(by_character, [("  ", "a"), ("", "b")]) == [
        ((), (32, 32, 97)),
        ((), (98,)),
    ]


def test_a_token_over_the_boundary_belongs_to_the_context() -> None:
    [(context, continuation), whole] = split_pairs(by_pairs, [("abc", "de"), ("abc", "d")])

    assert len(context) == 2 and continuation == (hash("e"),)
    assert whole[1] == ()


@pytest.mark.parametrize("first_ids", [(), (7,), (7, 8)])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17, 20])
@pytest.mark.parametrize("max_length", [3, 8, 100])
def test_windows_score_each_token_once(
    first_ids: tuple[int, ...], length: int, max_length: int
) -> None:
    token_ids = list(range(100, 100 + length))

    windows = cut_windows(token_ids, first_ids, max_length)

    scored = [i for w in windows for i in w.token_ids[w.num_context :]]
    assert scored == (token_ids if first_ids else token_ids[1:])
    for window in windows:
        assert 1 <= window.num_context < len(window.token_ids) <= max_length + 1
    if len(windows) > 1:  # The last has as much context as fits.
        assert len(windows[-1].token_ids) == max_length + 1


def test_windows_are_those_of_lm_eval() -> None:
    """Worked out by its rule: 20 tokens, passes of 8."""
    windows = cut_windows(list(range(1, 21)), (0,), 8)

    assert [(w.token_ids[0], w.token_ids[-1], w.num_context) for w in windows] == [
        (0, 8, 1),
        (8, 16, 1),
        (12, 20, 5),
    ]
    assert np.sum([len(w.token_ids) - w.num_context for w in windows]) == 20
