"""Random numbers by key, against the published test vectors."""

import numpy as np

from workers.model.philox import first_lane, uniform


def test_the_first_lane_is_that_of_the_reference() -> None:
    """Random123's known answer for philox4x32-10 at counter 0 and key 0."""
    assert hex(int(first_lane(np.array([0], np.uint64))[0])) == "0x6627e8d5"


def test_both_halves_of_the_key_count() -> None:
    keys = np.array([0, 1, 2**32, 2**63], np.uint64)

    assert len(set(first_lane(keys).tolist())) == 4


def test_numbers_are_spread_evenly_between_0_and_1() -> None:
    numbers = uniform(np.arange(20_000, dtype=np.uint64))

    assert numbers.dtype == np.float32
    assert numbers.min() >= 0
    assert numbers.max() < 1
    # Standard error of the mean of 20,000 uniform numbers is 0.002; of each tenth's share, 0.0021.
    assert abs(float(numbers.mean()) - 0.5) < 0.01
    shares = np.histogram(numbers, bins=10, range=(0, 1))[0] / len(numbers)
    assert abs(shares - 0.1).max() < 0.011


def test_a_key_always_gives_the_same_number_whatever_stands_beside_it() -> None:
    keys = np.array([5, 2**40 + 1, 7], np.uint64)

    assert uniform(keys).tolist() == [uniform(keys[i : i + 1])[0] for i in range(3)]
