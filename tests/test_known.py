"""Models that were looked at before: known while nothing has changed, and checked if it has."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from running import write_prompts
from tiny_models import byte_tokenizer, constant_model, save

from jobs.errors import ModelError
from jobs.model import ModelFacts, ModelRef
from workers.model import facts, known

LOGITS = [2, 1, 0, -1, -2]


@pytest.fixture
def looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ModelRef]:
    """Models that were looked at, with a cache of the test's own."""
    seen: list[ModelRef] = []
    look, cache = known._look, tmp_path / "cache"
    cache.mkdir()

    def note(model: ModelRef) -> ModelFacts:
        seen.append(model)
        return look(model)

    monkeypatch.setattr(known, "_look", note)
    monkeypatch.setattr(known, "cached_assets_path", lambda *args, **named: cache)
    return seen


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(save(constant_model(LOGITS), tmp_path / "model", tokenizer=byte_tokenizer()))


def test_a_model_is_looked_at_once_and_known_in_full(folder: Path, looked: list[ModelRef]) -> None:
    model = ModelRef(str(folder))

    first, second = known.read_facts(model), known.read_facts(model)

    assert first == second == facts.read_facts(model)
    assert looked == [model]
    absent = {
        field.name for field in dataclasses.fields(second) if getattr(second, field.name) is None
    }
    assert absent == {"revision", "first_token_id"}


def test_a_copy_elsewhere_is_known_too_with_its_own_files(
    tmp_path: Path, folder: Path, looked: list[ModelRef]
) -> None:
    known.read_facts(ModelRef(str(folder)))
    copy = folder.rename(tmp_path / "copy")

    found = known.read_facts(ModelRef(str(copy)))

    assert len(looked) == 1
    assert found == facts.read_facts(ModelRef(str(copy)))
    assert {os.path.dirname(path) for path in found.files} == {str(copy)}


def edit_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"vocab_size"', '"vocabulary"'))


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def rename_weights(folder: Path) -> None:
    """The same size, and other names: missing weights would be made up."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    assert b"embed_tokens" in content
    path.write_bytes(content.replace(b"embed_tokens", b"embed_tokenz"))


def spoil_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


@pytest.mark.parametrize("change", [edit_config, cut_weights, rename_weights, spoil_tokenizer])
def test_a_model_that_has_changed_is_checked_anew_and_refused_each_time(
    folder: Path, looked: list[ModelRef], change: object
) -> None:
    assert callable(change)
    model = ModelRef(str(folder))
    known.read_facts(model)

    change(folder)

    for _ in range(2):
        with pytest.raises(ModelError):
            known.read_facts(model)
    assert len(looked) == 3


@pytest.mark.parametrize("name", ["generation_config.json", "words.tiktoken", "more.safetensors"])
def test_a_file_that_is_added_is_a_change(folder: Path, looked: list[ModelRef], name: str) -> None:
    known.read_facts(ModelRef(str(folder)))
    content = (folder / "model.safetensors").read_bytes() if "safetensors" in name else b"{}"
    (folder / name).write_bytes(content)

    found = known.read_facts(ModelRef(str(folder)))

    assert len(looked) == 2
    assert found == facts.read_facts(ModelRef(str(folder)))


def test_another_tokenizer_is_another_model(
    tmp_path: Path, folder: Path, looked: list[ModelRef]
) -> None:
    other = save(constant_model(LOGITS), tmp_path / "b", tokenizer=byte_tokenizer(bos=True))
    known.read_facts(ModelRef(str(folder)))

    found = known.read_facts(ModelRef(str(folder), tokenizer=other))

    assert len(looked) == 2
    assert found.added_token_ids == ((257,), ())


def test_what_may_run_code_is_always_looked_at(folder: Path, looked: list[ModelRef]) -> None:
    for settings in ({"trust_remote_code": True}, {"allow_pickle": True}):
        for _ in range(2):
            known.read_facts(ModelRef(str(folder), **settings))

    assert len(looked) == 4


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"architecture": "Llama"}'])
def test_a_cache_that_is_damaged_costs_a_look(
    tmp_path: Path, folder: Path, looked: list[ModelRef], content: str
) -> None:
    first = known.read_facts(ModelRef(str(folder)))
    [kept] = (tmp_path / "cache").iterdir()
    kept.write_text(content)

    assert known.read_facts(ModelRef(str(folder))) == first
    assert known.read_facts(ModelRef(str(folder))) == first
    assert len(looked) == 2


def test_without_a_place_for_a_cache_models_are_looked_at(
    folder: Path, looked: list[ModelRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **named: object) -> Path:
        raise OSError("read-only")

    monkeypatch.setattr(known, "cached_assets_path", refuse)

    assert known.read_facts(ModelRef(str(folder))) == facts.read_facts(ModelRef(str(folder)))


def test_torch_is_asked_where_there_may_be_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.engines import torch as engine
    from workers.model import loading

    monkeypatch.setattr(loading, "find_device", lambda device: f"asked for {device}")
    monkeypatch.setattr(engine, "_GPU_DEVICES", (f"{tmp_path}/nvidia*",))
    assert engine.TorchEngine.find_device("auto") == "cpu"
    assert engine.TorchEngine.find_device("cuda") == "asked for cuda"

    (tmp_path / "nvidiactl").touch()

    assert engine.TorchEngine.find_device("auto") == "asked for auto"
    assert engine.TorchEngine.find_device("cpu") == "cpu"


PLAN = """
import sys
from pathlib import Path
import runner.run, cluster.pool
from jobs.job import Job
from jobs.model import ModelRef
from jobs.sampling import Sampling
from runner.manifest import describe_job
from runner.plan import make_plan
folder = Path(sys.argv[1])
model = ModelRef(str(folder / "model"), device="cpu")
job = Job(f"{folder}/in.parquet", f"{folder}/out", model, Sampling(max_new_tokens=1))
describe_job(make_plan(job))
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_a_run_on_a_known_model_imports_torch_in_its_workers_alone(
    tmp_path: Path, folder: Path
) -> None:
    write_prompts(tmp_path / "in.parquet", ["a"])
    said = [
        subprocess.run(
            [sys.executable, "-c", PLAN, str(tmp_path)],
            env={**os.environ, "HF_ASSETS_CACHE": str(tmp_path / "assets")},
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        for _ in range(2)
    ]  # fmt: skip

    assert said == ["['torch', 'transformers']", "[]"]
