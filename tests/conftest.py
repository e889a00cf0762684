"""Fixtures that several files share."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import tiny_models
import torch

from cluster.placement import Placement, Resources
from cluster.session import connect
from workers.generate import open_pipeline
from workers.pipeline import BatchPipeline


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tests compute as a worker does, so that numbers agree to the last bit."""
    torch.set_num_threads(1)
    yield


@pytest.fixture(scope="session")
def session() -> Iterator[Resources]:
    """One Ray for all tests that can share it: starting it takes seconds."""
    with connect(Placement()) as resources:
        yield resources


@pytest.fixture
def shared_ray(session: Resources, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has run_job() use that Ray instead of one of its own."""
    monkeypatch.setattr("runner.run.connect", lambda placement: nullcontext(session))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of the tiny models, by name."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = tiny_models.byte_tokenizer()
    return {
        "const5": tiny_models.save(tiny_models.constant_model([2, 1, 0, -1, -2]), root / "const5"),
        "succ12": tiny_models.save(tiny_models.successor_model(), root / "succ12"),
        "positions": tiny_models.save(tiny_models.position_model(), root / "positions"),
        "emoji": tiny_models.save(tiny_models.emoji_model(), root / "emoji", tokenizer=tokenizer),
    }


@pytest.fixture(scope="session")
def const5(models: dict[str, str]) -> BatchPipeline:
    """Logits 2, 1, 0, -1, -2 at every step."""
    return open_pipeline(models["const5"], max_batch_size=8)


@pytest.fixture(scope="session")
def succ12(models: dict[str, str]) -> BatchPipeline:
    """Counts up to 11 and starts again."""
    return open_pipeline(models["succ12"], max_batch_size=8)


@pytest.fixture(scope="session")
def echo() -> BatchPipeline:
    """Byte tokens and pseudo-random logits."""
    return open_pipeline("echo", engine="echo", max_batch_size=8, max_length=64)


@pytest.fixture(scope="session")
def demo() -> BatchPipeline:
    """The demo model, as the golden numbers were made."""
    return open_pipeline("demo", max_batch_size=32, max_length=512)


@pytest.fixture
def data() -> Path:
    """Facts and figures that tests compare with."""
    return Path(__file__).parent / "data"
