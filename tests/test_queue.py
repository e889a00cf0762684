"""Whose turn it is: every shard once, and what is read ahead is what comes next."""

import random

import pytest

from cluster.queue import ShardQueue
from cluster.trial import Trial
from jobs.plan import Shard


def make_queue(num_shards: int) -> ShardQueue:
    queue = ShardQueue()
    queue.extend(Trial(Shard(i, i, i + 1)) for i in range(num_shards))
    return queue


def take(queue: ShardQueue, worker: str, num_free: int = 0) -> tuple[int, int | None]:
    trial, ahead = queue.take(worker, num_free=num_free)
    return trial.shard.index, None if ahead is None else ahead.shard.index


def test_a_worker_is_given_what_it_has_read_ahead() -> None:
    queue = make_queue(3)

    assert [take(queue, "a") for _ in range(3)] == [(0, 1), (1, 2), (2, None)]
    assert not queue


def test_workers_that_are_free_take_what_comes_next_so_it_is_not_promised() -> None:
    queue = make_queue(5)

    assert take(queue, "a", num_free=1) == (0, 2)
    assert take(queue, "b") == (1, 3)
    assert take(queue, "b") == (3, 4)
    assert take(queue, "a") == (2, None)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 16])
def test_promises_are_kept_but_for_the_last_whatever_order_workers_end_in(num_workers: int) -> None:
    queue, chance = make_queue(200), random.Random(num_workers)
    workers = [f"worker {i}" for i in range(num_workers)]
    promised: dict[str, int | None] = {}
    done, num_wasted = [], 0

    for number in range(200):
        is_start = number < num_workers
        worker = workers[number] if is_start else chance.choice(workers)
        shard, ahead = take(queue, worker, num_free=num_workers - number - 1 if is_start else 0)
        if not is_start:
            num_wasted += promised[worker] != shard
        promised[worker] = ahead
        done.append(shard)
        others = [p for w, p in promised.items() if w != worker and p is not None]
        assert ahead is None or ahead not in others

    assert sorted(done) == list(range(200))
    assert num_wasted <= 2 * num_workers


def test_where_all_is_promised_a_free_worker_takes_the_newest_promise() -> None:
    """The one who was given it has begun last, and so will be free last."""
    queue = make_queue(4)
    assert take(queue, "a") == (0, 1)
    assert take(queue, "b") == (2, 3)

    assert take(queue, "c") == (3, None)
    assert take(queue, "b") == (1, None)


def test_a_shard_in_trouble_comes_first_and_alone() -> None:
    queue = make_queue(4)
    trial, _ = queue.take("a", num_free=0)
    trial.is_alone = True
    queue.put_back(trial)

    assert take(queue, "a") == (0, None)
    assert take(queue, "a") == (1, 2)


def test_a_shard_that_has_lost_a_worker_is_not_read_ahead_again() -> None:
    queue = make_queue(4)
    _, ahead = queue.take("a", num_free=0)
    assert ahead is not None
    ahead.is_alone = True

    queue.forget("a")

    assert take(queue, "b") == (1, None)
    assert take(queue, "b") == (2, 3)


def test_what_is_read_ahead_passes_over_a_shard_in_trouble() -> None:
    queue = make_queue(5)
    trial, ahead = queue.take("a", num_free=1)
    assert ahead is not None and ahead.shard.index == 2
    trial.is_alone = ahead.is_alone = True
    queue.forget("a")
    queue.put_back(trial)

    assert take(queue, "b") == (0, None)
    assert take(queue, "c") == (1, 3)


def test_retried_shards_are_neither_read_ahead_nor_beside_others() -> None:
    queue = ShardQueue()
    queue.extend([Trial(Shard(0, 0, 1), retry=True), Trial(Shard(1, 1, 2), retry=True)])

    assert take(queue, "a") == (0, None)


def test_what_a_worker_that_is_gone_was_promised_is_free_again() -> None:
    queue = make_queue(3)
    take(queue, "a")

    queue.forget("a")

    assert take(queue, "b") == (1, 2)
