"""Rows that take turns: who is live follows from the rows and their order alone."""

import random

from workers.turns import Queue, Turns


def test_all_rows_come_in_at_once_where_there_is_room() -> None:
    queue = Queue([5, 5, 5], Turns(3, 15))

    assert queue.arrivals() == [0, 1, 2]
    assert queue.arrivals() == []


def test_rows_come_in_when_an_eighth_of_the_places_is_free() -> None:
    queue = Queue([1] * 30, Turns(16, 1000))

    assert queue.arrivals() == list(range(16))
    queue.leave(3)
    assert queue.arrivals() == []
    queue.leave(7)
    assert queue.arrivals() == [16, 17]


def test_a_row_comes_in_only_with_room_for_its_tokens() -> None:
    queue = Queue([60, 30, 50, 5], Turns(4, 100))

    assert queue.arrivals() == [0, 1]
    queue.leave(1)
    assert queue.arrivals() == []
    queue.leave(0)
    assert queue.arrivals() == [2, 3]


def test_a_row_that_is_over_the_limit_comes_in_alone() -> None:
    queue = Queue([500, 500], Turns(4, 100))

    assert queue.arrivals() == [0]
    assert queue.arrivals() == []
    queue.leave(0)
    assert queue.arrivals() == [1]


def test_a_row_that_waits_can_leave() -> None:
    queue = Queue([1, 1, 1], Turns(1, 10))
    queue.arrivals()

    assert queue.leave(1) is False
    assert queue.leave(0) is True
    assert queue.arrivals() == [2]


def test_every_row_has_its_turn_once_and_limits_are_kept() -> None:
    generator = random.Random(0)
    for _ in range(50):
        sizes = [generator.randint(1, 50) for _ in range(generator.randint(1, 60))]
        turns = Turns(generator.randint(1, 12), generator.randint(20, 200))
        queue, live, seen = Queue(sizes, turns), set(), []
        while len(seen) < len(sizes) or live:
            arriving = queue.arrivals()
            seen += arriving
            live |= set(arriving)
            assert 1 <= len(live) <= turns.max_live
            assert len(live) == 1 or sum(sizes[row] for row in live) <= turns.max_tokens
            assert queue.num_open == min(turns.max_live, len(live) + len(sizes) - len(seen))
            for row in generator.sample(sorted(live), generator.randint(1, len(live))):
                queue.leave(row)
                live.discard(row)
        assert seen == list(range(len(sizes)))
