"""A short `make chaos`: kills at random moments, and nothing is lost, doubled or different."""

from dataclasses import asdict
from pathlib import Path

import pytest
from chaos import play

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("model", "rounds", "num_shards"), [("echo", 4, 60), ("demo", 1, 12)])
def test_whoever_is_killed_nothing_is_lost(
    tmp_path: Path, model: str, rounds: int, num_shards: int
) -> None:
    outcome = asdict(play(tmp_path, model=model, rounds=rounds, num_shards=num_shards, seed=7))

    assert outcome["rounds"] == rounds
    wrong = ("rows_lost", "rows_twice", "parts_differing", "not_verified")
    assert {name: outcome[name] for name in wrong} == dict.fromkeys(wrong, 0)
