"""A shard's way to its report: who is to blame is found, and chance is not blamed."""

import dataclasses

import pytest

from cluster.trial import Call, Cause, Trial
from jobs.errors import WorkerError
from jobs.plan import Shard
from jobs.report import Counts, Part, ShardReport
from jobs.tolerance import Tolerance


def play(trial: Trial, culprits: set[int], cause: Cause = "died") -> tuple[int, int]:
    """Goes on until the shard is done, where some rows lose every worker. Returns calls, losses."""
    calls = losses = 0
    while True:
        calls += 1
        rows = trial.rows_to_try
        start, stop = rows or (trial.shard.start, trial.shard.stop)
        known = {row_id for row_id, _ in trial.lessons.errors}
        if set(range(start, stop)) & culprits - known:
            losses += 1
            trial.lost(cause, "it died")
        elif rows is None:
            return calls, losses
        else:
            trial.passed()


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 64])
def test_the_one_row_that_ends_its_worker_is_found_wherever_it_is(num_rows: int) -> None:
    for culprit in range(100, 100 + num_rows):
        trial = Trial(Shard(3, 100, 100 + num_rows))

        _, losses = play(trial, {culprit})

        [(row_id, error)] = trial.lessons.errors
        assert row_id == culprit
        assert (error.code, error.retryable, error.attempts) == ("worker_crash", True, 2)
        assert losses <= 4 + num_rows.bit_length()


def test_several_rows_are_found_one_after_the_other() -> None:
    trial = Trial(Shard(0, 0, 40))

    play(trial, {0, 17, 39})

    assert sorted(row_id for row_id, _ in trial.lessons.errors) == [0, 17, 39]


def test_a_row_that_raises_is_certain_and_found_with_what_it_said() -> None:
    trial = Trial(Shard(0, 0, 8))

    _, losses = play(trial, {5}, "raised")

    [(row_id, error)] = trial.lessons.errors
    assert (row_id, error.code, error.message) == (5, "engine_error", "it died")
    assert losses <= 1 + 3 + 1


def test_a_row_that_hangs_is_told_from_one_that_crashes() -> None:
    trial = Trial(Shard(0, 0, 2))

    play(trial, {1}, "hung")

    [(_, error)] = trial.lessons.errors
    assert error.code == "worker_crash"
    assert "not answered in time" in error.message


def test_where_it_takes_no_row_none_is_blamed() -> None:
    """What fails before any row is run fails for the shard: its input cannot be read, say."""
    trial = Trial(Shard(2, 0, 64))
    trial.lost("raised", "OSError: gone")

    with pytest.raises(WorkerError, match="shard 2 cannot be done, and no row of it is to blame"):
        trial.lost("raised", "OSError: gone")

    assert trial.lessons.errors == ()


def test_a_search_for_one_cause_leaves_another_its_own() -> None:
    trial = Trial(Shard(0, 0, 8))
    trial.lost("died", "chance")
    trial.lost("died", "chance")
    while trial.rows_to_try is not None:
        trial.passed()

    play(trial, {5}, "raised")

    assert [row_id for row_id, _ in trial.lessons.errors] == [5]


def test_halving_begins_where_it_makes_a_difference() -> None:
    trial = Trial(Shard(0, 0, 20))

    trial.short_of_memory("no memory", 64)

    assert trial.lessons.halvings == 2


def test_chance_is_blamed_on_no_row_and_changes_nothing() -> None:
    trial = Trial(Shard(0, 0, 64))
    for _ in range(2):
        trial.lost("died", "the node went away")
    while trial.rows_to_try is not None:
        trial.passed()

    assert trial.lessons == Trial(Shard(0, 0, 64)).lessons


def test_a_shard_that_is_lost_again_and_again_without_a_culprit_is_given_up() -> None:
    trial = Trial(Shard(7, 0, 4))

    with pytest.raises(WorkerError, match=r"shard 7 is lost again and again.*--rows-per-shard"):
        for _ in range(100):
            if trial.rows_to_try is None:
                trial.lost("died", "out of luck")
            else:
                trial.passed()


def test_a_shard_full_of_culprits_is_given_up() -> None:
    trial = Trial(Shard(0, 0, 64))

    with pytest.raises(WorkerError, match="more than 8 rows that end their worker"):
        play(trial, set(range(64)))


def test_want_of_memory_halves_the_batch_until_it_is_a_row() -> None:
    trial = Trial(Shard(0, 0, 64))
    for _ in range(6):
        trial.short_of_memory("no memory", 64)

    assert trial.lessons.halvings == 6
    with pytest.raises(WorkerError, match="A single row's batch does not help"):
        trial.short_of_memory("no memory", 64)


@pytest.mark.parametrize("cause", ["raised", "short of memory"])
def test_what_goes_wrong_beside_another_shard_is_believed_of_a_shard_alone(cause: Cause) -> None:
    trial, other = Trial(Shard(3, 24, 32)), Trial(Shard(4, 32, 40))

    assert Call("worker", trial, other).failed(cause, "beside", 8) is trial
    assert (trial.losses, trial.lessons, trial.rows_to_try) == (0, Trial(trial.shard).lessons, None)
    assert not trial.may_overlap and not other.may_overlap

    Call("worker", trial).failed(cause, "alone", 8)
    assert (trial.rows_to_try, trial.lessons.halvings) == (
        ((24, 24), 0) if cause == "raised" else (None, 1)
    )


@pytest.mark.parametrize("cause", ["died", "hung"])
def test_a_worker_lost_beside_another_shard_counts_once_and_parts_the_two(cause: Cause) -> None:
    """So a shard that loses its worker has no more attempts than before, and its neighbour one."""
    trial, other = Trial(Shard(3, 24, 32)), Trial(Shard(4, 32, 40))

    Call("worker", trial, other).failed(cause, "lost", 8)

    assert (trial.losses, trial.rows_to_try, other.losses) == (1, None, 0)
    assert not trial.may_overlap and not other.may_overlap
    Call("worker", trial).failed(cause, "lost", 8)
    assert trial.rows_to_try == (24, 24)


def test_a_node_taken_away_with_notice_says_nothing_of_its_shard() -> None:
    trial = Trial(Shard(3, 24, 32))

    Call("worker", trial).failed(None, "preempted", 8)

    assert (trial.losses, trial.rows_to_try) == (0, None)


def test_what_is_being_done_is_said_in_words() -> None:
    trial = Trial(Shard(3, 10, 14))
    assert trial.where == "on shard 3"
    trial.lost("died", "")
    trial.lost("died", "")
    assert trial.where == "on shard 3, trying no row alone"
    trial.passed()
    assert trial.where == "on shard 3, trying rows 10 to 11 alone"
    trial.passed()
    assert trial.where == "on shard 3, trying row 12 alone"


def test_the_watchdog_learns_what_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    from cluster import watch

    now = 0.0
    monkeypatch.setattr(watch.time, "monotonic", lambda: now)
    report = ShardReport(Shard(0, 0, 10), Part("p", 10, 1, ""), Counts(), seconds=200.0)
    dog = watch.Watch(Tolerance())
    big = Shard(1, 10, 20)

    now = 1e6
    assert not dog.is_hung(big, since=0.0), "nothing is known yet"
    dog.learn(report)
    assert not dog.is_hung(big, since=now - 1999)
    assert dog.is_hung(big, since=now - 2001)
    dog.learn(dataclasses.replace(report, seconds=1.0))
    assert not dog.is_hung(big, since=now - 1999), "the slowest counts"


@pytest.mark.parametrize(("asked", "is_hung"), [(5.0, True), (0.0, False)])
def test_the_watchdog_does_as_it_is_told(asked: float, is_hung: bool) -> None:
    from cluster import watch

    dog = watch.Watch(Tolerance(shard_timeout=asked))

    assert dog.is_hung(Shard(0, 0, 1), since=watch.time.monotonic() - 6) == is_hung


def test_silence_is_broken_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    from cluster import watch

    now = 0.0
    monkeypatch.setattr(watch.time, "monotonic", lambda: now)
    dog = watch.Watch(Tolerance())
    said = []
    for now in range(0, 100, 10):
        said.append(dog.is_silent(is_news=now == 40))

    assert [10 * i for i, yes in enumerate(said) if yes] == [30, 70]
