"""The cache: rows take pages as they grow, share what they begin with, and give pages back."""

import random

import numpy as np
import pytest
import torch

from workers.model import kv_cache
from workers.model.kv_cache import PAGE, KVCache, PagePool, untouched
from workers.model.shape import LayerShape

CPU = torch.device("cpu")
SHAPE = LayerShape(2, 4, 3, torch.float32, None)


def make_cache(*sizes: int, num_live: int | None = None) -> KVCache:
    return KVCache(PagePool(CPU), sizes, num_tokens=sum(sizes), num_live=num_live or len(sizes))


def pages_of(cache: KVCache, row: int) -> list[int]:
    num_pages = -(-int(cache.written[row]) // PAGE)
    return cache.table[row, :num_pages].tolist()


def test_a_row_takes_the_pages_that_it_fills_and_one_more_when_it_grows() -> None:
    cache = make_cache(20, 60)
    cache.admit(0, 16)
    cache.admit(1, 33)
    cache.written[:2] = 16, 33
    assert (pages_of(cache, 0), pages_of(cache, 1)) == ([0], [1, 2, 3])

    cache.make_room(np.array([0, 1]))
    cache.written += 1

    assert (pages_of(cache, 0), pages_of(cache, 1)) == ([0, 4], [1, 2, 3])


def test_pages_of_a_row_that_ends_are_taken_first() -> None:
    cache = make_cache(40, 40, 40, num_live=2)
    cache.admit(0, 40)
    cache.admit(1, 10)
    cache.release(0)
    cache.admit(2, 20)
    cache.written[:] = 0, 10, 20

    assert cache.rows == [1, 2]
    assert pages_of(cache, 2) == [0, 1]


def test_pages_that_rows_share_stay_until_the_last_of_them_ends() -> None:
    cache = make_cache(40, 40, 70, 32)
    prefix = 3
    cache.admit(prefix, 32)
    cache.written[prefix] = 32
    for row in (0, 1):
        cache.admit(row, 40, prefix, 32)
        assert cache.written[row] == 32
        cache.written[row] = 40
    assert (pages_of(cache, 0), pages_of(cache, 1)) == ([0, 1, 2], [0, 1, 3])

    cache.release(0)
    cache.admit(2, 70)

    cache.written[2] = 70
    assert pages_of(cache, 2) == [2, 4, 5, 6, 7]

    cache.release(prefix)
    assert pages_of(cache, 1) == [0, 1, 3], "the row goes on holding them"
    cache.release(1)
    cache.admit(0, 40)
    cache.written[0] = 40
    assert pages_of(cache, 0) == [0, 1, 3]


def test_rows_that_come_grow_and_go_never_hold_the_same_page() -> None:
    generator = random.Random(0)
    for _ in range(30):
        sizes = [generator.randint(1, 90) for _ in range(12)]
        most = max(sum(sizes) // 3, *sizes)
        cache = KVCache(PagePool(CPU), sizes, num_tokens=most, num_live=4)
        waiting = list(range(len(sizes)))
        while waiting or cache.rows:
            held = sum(sizes[row] for row in cache.rows)
            while waiting and len(cache.rows) < 4 and held + sizes[waiting[0]] <= most:
                row = waiting.pop(0)
                cache.admit(row, min(3, sizes[row]))
                cache.written[row] = min(3, sizes[row])
                held += sizes[row]
            for row in list(cache.rows):
                if cache.written[row] == sizes[row]:
                    cache.release(row)
            cache.make_room(np.array(cache.rows, np.int64))
            cache.written[cache.rows] += 1
            pages = [page for row in cache.rows for page in pages_of(cache, row)]
            assert len(pages) == len(set(pages))


def test_pages_go_from_batch_to_batch_and_only_more_of_them_are_made_anew() -> None:
    pool = PagePool(CPU)
    first = KVCache(pool, [100], num_tokens=100, num_live=1).pages  # The cache is gone at once.
    first.allocate(0, SHAPE)

    small = KVCache(pool, [50], num_tokens=50, num_live=1)
    beside = KVCache(pool, [50], num_tokens=50, num_live=1)
    assert small.pages is first
    assert beside.pages is not first
    del beside, small

    assert KVCache(pool, [100], num_tokens=100, num_live=1).pages is first
    assert KVCache(pool, [200], num_tokens=200, num_live=1).pages is not first


def test_what_is_gathered_ends_where_its_row_ends() -> None:
    cache = make_cache(40, 5)
    cache.pages.allocate(0, SHAPE)
    cache.pages.layers[0].fill_(torch.nan)
    cache.admit(0, 40)
    cache.admit(1, 5)
    for row, length in ((0, 40), (1, 5)):
        pages, places = cache.places(row, 0, length)
        cache.pages.keys(0, 4)[pages, :, :, places] = torch.arange(length)[:, None, None] + 1.0
        cache.pages.values(0, 4)[pages, :, places] = torch.arange(length)[:, None, None] + 1.0

    keys, values = cache.gather(0, 4, np.array([1, 0]), torch.tensor([5, 40]))

    assert (keys.shape, values.shape) == ((2, 2, 40, 4), (2, 2, 40, 3))
    short = [*range(1, 6), *[0] * 35]
    assert keys[0, 1, :, 3].tolist() == values[0, 1, :, 2].tolist() == short
    assert keys[1, 0, :, 0].tolist() == values[1, 0, :, 0].tolist() == list(range(1, 41))


def test_memory_that_cannot_be_had_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(kv_cache.mmap, "mmap", refuse)

    with pytest.raises(MemoryError, match="not enough memory for 4,000 bytes"):
        untouched((10, 100), torch.float32, CPU)
