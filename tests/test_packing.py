"""Packing: every row in one batch, no batch over a cap, and nothing but the rows decides."""

import random
from dataclasses import replace

from jobs.job import Packing
from workers.packing import RowSize, pack_rows

FIXED = Packing(schedule="fixed")


def sizes(*prompts: int, new: int = 10) -> list[RowSize]:
    return [RowSize(prompt, new) for prompt in prompts]


def test_longest_first_and_equal_rows_in_input_order() -> None:
    batches = pack_rows(sizes(5, 30, 5, 20, 30), replace(FIXED, rows_per_batch=2))

    assert batches == [[1, 4], [3, 0], [2]]


def test_a_batch_holds_no_more_tokens_than_it_may() -> None:
    batches = pack_rows(
        sizes(50, 40, 30, 20), replace(FIXED, rows_per_batch=9, max_batch_tokens=100)
    )

    assert batches == [[0], [1, 2], [3]]


def test_a_row_that_is_over_the_cap_alone_makes_a_batch() -> None:
    assert pack_rows(sizes(500, 40), replace(FIXED, max_batch_tokens=100)) == [[0], [1]]


def test_with_logits_batches_are_in_input_order_and_within_their_budget() -> None:
    packing = Packing(rows_per_batch=9, logits_budget_bytes=2500)

    batches = pack_rows(sizes(5, 30, 5, 20, 30), packing, bulky_bytes_per_token=100)

    assert batches == [[0, 1], [2, 3], [4]]


def test_no_rows_make_no_batches() -> None:
    assert pack_rows([], Packing()) == []


def test_every_row_is_packed_once_and_within_the_caps() -> None:
    generator = random.Random(0)
    for _ in range(50):
        rows = [
            RowSize(generator.randint(1, 300), generator.randint(1, 50))
            for _ in range(generator.randint(1, 80))
        ]
        packing = replace(
            FIXED,
            rows_per_batch=generator.randint(1, 20),
            max_batch_tokens=generator.randint(100, 2000),
        )
        for bytes_per_token in (0, 4):
            batches = pack_rows(rows, packing, bulky_bytes_per_token=bytes_per_token)
            assert sorted(place for batch in batches for place in batch) == list(range(len(rows)))
            for batch in batches:
                assert len(batch) <= packing.rows_per_batch
                tokens = sum(rows[place].num_tokens for place in batch)
                assert len(batch) == 1 or tokens <= packing.max_batch_tokens
            assert batches == pack_rows(rows, packing, bulky_bytes_per_token=bytes_per_token)


def test_rows_that_take_turns_are_one_batch_longest_first() -> None:
    packing = Packing(rows_per_batch=2, max_batch_tokens=70, schedule="refill")

    assert pack_rows(sizes(5, 30, 5, 20, 30), packing) == [[1, 4, 3, 0, 2]]


def test_rows_with_logits_and_rows_alone_take_no_turns() -> None:
    packing = Packing(rows_per_batch=2, schedule="refill")

    assert pack_rows(sizes(5, 30, 5), packing, bulky_bytes_per_token=1) == [[0, 1], [2]]
    assert pack_rows(sizes(5, 30, 5), packing.halved(1)) == [[1], [0], [2]]
