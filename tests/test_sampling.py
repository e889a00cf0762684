"""Sampling values as asked for and as settled, and the seeds of rows."""

from itertools import pairwise

import pytest

from jobs.sampling import (
    RowSampling,
    Sampling,
    SamplingDefaults,
    check_sampling,
    resolve_sampling,
    row_seed,
    scatter,
)


def test_what_is_asked_for_wins_over_the_model_and_the_model_over_nothing() -> None:
    asked = Sampling(max_new_tokens=3, temperature=0.0, top_k=0)
    defaults = SamplingDefaults(temperature=0.7, top_k=20, top_p=0.9)

    settled, origins = resolve_sampling(asked, defaults)

    assert settled == RowSampling(max_new_tokens=3, temperature=0.0, top_k=-1, top_p=0.9)
    assert origins == {
        "min_new_tokens": "neutral",
        "temperature": "asked",
        "top_k": "asked",
        "top_p": "model",
        "min_p": "neutral",
        "frequency_penalty": "neutral",
        "presence_penalty": "neutral",
        "repetition_penalty": "neutral",
    }


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**32, 2**64 - 1, 2**70])
def test_any_integer_is_a_seed(seed: int) -> None:
    check_sampling(Sampling(max_new_tokens=1, seed=seed))


def test_the_scatter_is_that_of_splitmix64() -> None:
    """The first outputs from state 0, as its authors' reference program prints them."""
    step = 0x9E3779B97F4A7C15

    assert scatter(0) == 0xE220A8397B1DCDAF
    assert scatter(step) == 0x6E789E6AA1B965F4
    assert scatter(2 * step % 2**64) == 0x06C45D188009454F


def test_rows_and_jobs_share_no_stretch_of_keys() -> None:
    """Draws are keyed by seed + length: seeds that lie close would share numbers, shifted."""
    seeds = [row_seed(job, row) for job in range(20) for row in range(50)]
    ordered = sorted(seeds)

    assert len(set(seeds)) == len(seeds)
    gaps = [b - a for a, b in pairwise(ordered)]
    # 1,000 seeds of 20 scattered jobs: two within 2**20 of each other by chance is 5e-7 likely.
    assert min(gaps) > 2**20


def test_a_rows_seed_depends_on_job_seed_and_row_alone() -> None:
    assert row_seed(7, 3) == (scatter(7) + 3 * 2**32) % 2**64
    assert row_seed(7 + 2**64, 3) == row_seed(7, 3)
