"""Where a job runs: how many workers, what each is given, and what cannot be had."""

import pytest

from cluster.placement import Placement, Resources, Seats, settle_seats
from jobs.errors import PlacementError, SettingError

CPUS = Resources(num_cpus=8, num_gpus=0)
GPUS = Resources(num_cpus=8, num_gpus=2)


def seats(placement: Placement, resources: Resources, **settings: object) -> Seats:
    return settle_seats(
        placement, resources, **({"device": "cpu", "threads": 1, "num_shards": 100} | settings)
    )


def test_by_default_there_is_a_worker_a_core_with_one_thread_each() -> None:
    assert seats(Placement(), CPUS) == Seats(8, 1.0, 0.0)
    assert seats(Placement(), CPUS, threads=3) == Seats(2, 3.0, 0.0)


def test_by_default_there_is_a_worker_a_gpu() -> None:
    assert seats(Placement(), GPUS, device="cuda") == Seats(2, 1.0, 1.0)
    assert seats(Placement(gpus_per_worker=0.5), GPUS, device="cuda") == Seats(4, 1.0, 0.5)


def test_there_are_never_more_workers_than_shards() -> None:
    assert seats(Placement(num_workers=5), CPUS, num_shards=2).num_workers == 2
    assert seats(Placement(), CPUS, num_shards=1).num_workers == 1


def test_more_workers_may_be_asked_for_than_fit_now(caplog: pytest.LogCaptureFixture) -> None:
    """A cluster may grow, and the others wait for a seat; one machine does not."""
    assert seats(Placement(num_workers=20, address="auto"), CPUS).num_workers == 20
    assert caplog.text == ""
    assert seats(Placement(num_workers=20), CPUS).num_workers == 8
    assert "20 workers were asked for; 8 fit on this machine" in caplog.text


def test_fractions_fit_as_often_as_they_should() -> None:
    """Case J15; in floats, 1 // 0.1 is 9."""
    one = Resources(num_cpus=100, num_gpus=1)

    for part, count in ((0.1, 10), (0.2, 5), (0.3, 3), (1.0, 1)):
        assert seats(Placement(gpus_per_worker=part), one, device="cuda").num_workers == count


@pytest.mark.parametrize(
    ("placement", "resources", "device", "words"),
    [
        (Placement(gpus_per_worker=1), CPUS, "cuda", "needs 1 CPUs and 1 GPUs; the cluster has 8"),
        (Placement(cpus_per_worker=9), CPUS, "cpu", "needs 9 CPUs and 0 GPUs; the cluster has 8"),
        (Placement(gpus_per_worker=0), GPUS, "cuda", "gpus_per_worker is 0. Use --device cpu"),
    ],
)
def test_what_cannot_be_had_is_said_with_what_there_is(
    placement: Placement, resources: Resources, device: str, words: str
) -> None:
    """Case J14: a worker that is to use a GPU has one, or there is no worker."""
    with pytest.raises(PlacementError) as caught:
        seats(placement, resources, device=device)

    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_workers": 0}, "num_workers must be at least 1, got 0."),
        ({"gpus_per_worker": -1.0}, "gpus_per_worker must be 0, a fraction of 1, or a whole"),
        ({"gpus_per_worker": float("nan")}, "or a whole number, got nan."),
        ({"gpus_per_worker": float("inf")}, "or a whole number, got inf."),
        (
            {"cpus_per_worker": float("nan")},
            "cpus_per_worker must be finite and at least 0.0001, got nan.",
        ),
        ({"gpus_per_worker": 1.5}, "a fraction of 1, or a whole number, got 1.5."),
        ({"cpus_per_worker": 0.0}, "cpus_per_worker must be finite and at least 0.0001, got 0."),
    ],
)
def test_bad_values_are_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(SettingError) as caught:
        Placement(**settings)

    assert words in str(caught.value)
