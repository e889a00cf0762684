"""Passes: every token of every prompt once, in order, and no pass longer than it may be."""

import random

import numpy as np
import torch

from workers.model.kv_cache import KVCache, PagePool
from workers.model.steps import DecodeStep, PromptSpan, common_length, cut_passes, ending_places


def spans_of(*lengths: int) -> list[PromptSpan]:
    pool = PagePool(torch.device("cpu"))
    cache = KVCache(pool, lengths, num_tokens=sum(lengths), num_live=len(lengths))
    return [
        PromptSpan(cache, row, tuple(range(length)), 0, length)
        for row, length in enumerate(lengths)
    ]


def test_prompts_stand_side_by_side_up_to_the_limit() -> None:
    passes = cut_passes(spans_of(40, 30, 30, 5), 100)

    assert [[span.num_tokens for span in one] for one in passes] == [[40, 30, 30], [5]]


def test_a_prompt_that_is_longer_is_cut_and_ends_once() -> None:
    [first, second, third] = cut_passes(spans_of(25, 3), 10)

    assert [(s.start, s.stop, s.ending_rows) for s in first] == [(0, 10, [])]
    assert [(s.start, s.stop, s.ending_rows) for s in second] == [(10, 20, [])]
    assert [(s.start, s.stop, s.ending_rows) for s in third] == [(20, 25, [0]), (0, 3, [1])]


def test_every_token_is_run_once_in_order() -> None:
    generator = random.Random(0)
    for _ in range(50):
        lengths = [generator.randint(1, 40) for _ in range(generator.randint(1, 9))]
        most = generator.randint(1, 30)
        seen: list[list[int]] = [[] for _ in lengths]
        for one in cut_passes(spans_of(*lengths), most):
            assert sum(span.num_tokens for span in one) <= most
            for span in one:
                assert span.positions.tolist() == span.token_ids.tolist()
                seen[span.row] += span.token_ids.tolist()
        assert seen == [list(range(length)) for length in lengths]


def test_logits_are_wanted_at_the_ends_of_rows() -> None:
    [one] = cut_passes(spans_of(4, 3, 2), 100)
    cache = one[0].cache
    for span in one:
        span.mark_written()
    decode = DecodeStep(cache, np.array([2, 0]), torch.tensor([7, 8]))

    assert ending_places(one).tolist() == [3, 6, 8]
    assert ending_places([decode]).tolist() == [0, 1]
    decode.mark_written()
    assert cache.written.tolist() == [5, 3, 3]


def test_what_prompts_begin_with_in_common_leaves_each_a_token() -> None:
    assert common_length([(1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3)]) == 2
    assert common_length([(1, 2, 3, 4), (1, 2, 9, 5), (1, 2, 3, 9)]) == 2
    assert common_length([(5, 6), (5, 6)]) == 1
    assert common_length([(1, 2), (3, 4)]) == 0
    assert common_length([(1, 2, 3)]) == 0
    assert common_length([]) == 0
