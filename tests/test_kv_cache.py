"""The cache: rows of like length share a block, and live rows stand at its front."""

import torch

from workers.model.kv_cache import KVCache, RowLength, group_by_length
from workers.model.shape import LayerShape

CPU = torch.device("cpu")
SHAPES = {0: LayerShape(2, 4, 3, torch.float32, None)}


def lengths(*prompts: int) -> list[RowLength]:
    return [RowLength(row, prompt, prompt + 10) for row, prompt in enumerate(prompts)]


def test_rows_of_like_length_share_a_block() -> None:
    groups = group_by_length(lengths(10, 300, 12, 290, 100, 11))

    assert [[length.row for length in group] for group in groups] == [[1, 3], [4], [2, 5, 0]]


def test_grouping_does_not_depend_on_the_order_of_equal_rows() -> None:
    assert [length.row for length in group_by_length(lengths(5, 5, 5))[0]] == [0, 1, 2]


def test_a_block_has_room_for_its_longest_row_and_no_more() -> None:
    cache = KVCache(lengths(10, 300), SHAPES, CPU)
    cache.admit([0, 1])

    assert [block.keys[0].shape for block in cache.blocks] == [(1, 2, 310, 4), (1, 2, 20, 4)]
    assert [block.values[0].shape for block in cache.blocks] == [(1, 2, 310, 3), (1, 2, 20, 3)]


def test_the_last_row_takes_the_place_of_one_that_ends() -> None:
    cache = KVCache(lengths(5, 4, 3), SHAPES, CPU)
    cache.admit([0, 1, 2])
    [block] = cache.blocks
    block.written[:] = 5, 4, 3
    for place in range(3):
        block.keys[0][place] = place + 1

    cache.release(0)

    assert cache.rows == [2, 1]
    assert block.written.tolist() == [3, 4]
    assert block.keys[0][0, 0, :6, 0].tolist() == [3, 3, 3, 0, 0, 1]
    assert block.keys[0][1, 0, :4, 0].tolist() == [2, 2, 2, 2]


def test_a_block_without_rows_is_gone() -> None:
    cache = KVCache(lengths(300, 5), SHAPES, CPU)
    cache.admit([0, 1])

    cache.release(1)
    assert cache.rows == [0]
    assert len(cache.blocks) == 1
    cache.release(0)
    assert cache.rows == []
