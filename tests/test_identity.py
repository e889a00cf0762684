"""What decides the bytes of a job: whatever changes it is found and named, and nothing else is."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import make_job, prepared, run_plan, write_prompts
from tiny_models import byte_tokenizer, save, table_model

from cluster.placement import Placement
from jobs.errors import ModelError, OutputError, RefusedError
from jobs.folder import JOB, PLAN, list_parts
from jobs.identity import find_differences, hash_files
from jobs.job import Job, Packing
from jobs.model import ModelRef
from jobs.plan import Plan
from jobs.sampling import Sampling
from jobs.scoring import Scoring
from jobs.tolerance import Tolerance
from runner.flags import FLAGS, Flag
from runner.manifest import (
    Intent,
    describe_job,
    read_asked,
    read_intent,
    refuse_other_job,
    write_intent,
)
from runner.options import read_job
from runner.plan import make_plan

FIELDS = {flag.field for flag in FLAGS if flag.owner not in (Placement, Tolerance)}
ELSEWHERE = [flag for flag in FLAGS if flag.owner in (Placement, Tolerance)]

# Each field of the job: another value than the usual job's, and the names that then differ.
CHANGES: dict[str, tuple[dict[str, object], set[str]]] = {
    "path": ({"path": "other"}, {"model"}),
    "dtype": ({"dtype": "bfloat16"}, {"dtype"}),
    "threads": ({"threads": 2}, {"threads_per_worker"}),
    "trust_remote_code": ({"trust_remote_code": True}, {"trust_remote_code"}),
    "prompt_column": ({"prompt_column": "other"}, {"prompt_column"}),
    "token_ids_column": (
        {"prompt_column": None, "token_ids_column": "ids"},
        {"kind", "prompt_column", "token_ids_column"},
    ),
    "add_special_tokens": ({"add_special_tokens": "no"}, {"add_special_tokens"}),
    "max_model_len": ({"max_model_len": 100}, {"max_model_len"}),
    "truncation": ({"truncation": "left"}, {"truncation"}),
    "max_new_tokens": ({"max_new_tokens": 5}, {"max_new_tokens"}),
    "min_new_tokens": ({"min_new_tokens": 1}, {"min_new_tokens"}),
    "temperature": ({"temperature": 0.7}, {"temperature"}),
    "top_k": ({"top_k": 5}, {"top_k"}),
    "top_p": ({"top_p": 0.9}, {"top_p"}),
    "min_p": ({"min_p": 0.1}, {"min_p"}),
    "frequency_penalty": ({"frequency_penalty": 0.5}, {"frequency_penalty"}),
    "presence_penalty": ({"presence_penalty": -0.5}, {"presence_penalty"}),
    "repetition_penalty": ({"repetition_penalty": 1.1}, {"repetition_penalty"}),
    "seed": ({"seed": 1}, {"seed"}),
    "stop_token_ids": ({"stop_token_ids": (7,)}, {"stop_token_ids"}),
    "ignore_eos": ({"ignore_eos": True}, {"ignore_eos"}),
    "logprobs": ({"logprobs": 2}, {"logprobs"}),
    "prompt_logprobs": ({"prompt_logprobs": 2}, {"prompt_logprobs"}),
    "output_logits": ({"output_logits": True}, {"output_logits"}),
    "logits_dtype": ({"logits_dtype": "float16"}, {"logits_dtype"}),
    "keep": ({"keep": ("id",)}, {"kept_columns"}),
    "output_prefix": ({"output_prefix": "x_"}, {"output_prefix"}),
    "output_format": ({"output_format": "arrow"}, {"output_format"}),
    "limit": ({"limit": 2}, {"rows"}),
    "rows_per_batch": ({"rows_per_batch": 2}, {"rows_per_batch", "rows_per_shard"}),
    "schedule": ({"schedule": "fixed"}, {"schedule"}),
    "max_batch_tokens": ({"max_batch_tokens": 100}, {"max_batch_tokens"}),
    "rows_per_shard": ({"rows_per_shard": 1}, {"rows_per_shard"}),
    "logits_budget_bytes": ({"logits_budget_bytes": 2**20}, {"logits_budget"}),
}

SCORED: dict[str, tuple[dict[str, object], dict[str, object], set[str]]] = {
    "text_column": ({"text_column": "prompt"}, {"text_column": "other"}, {"text_column"}),
    "context_column": (
        {"context_column": "prompt", "continuation_column": "other"},
        {"context_column": "other", "continuation_column": "other"},
        {"context_column"},
    ),
    "continuation_column": (
        {"context_column": "prompt", "continuation_column": "other"},
        {"context_column": "prompt", "continuation_column": "prompt"},
        {"continuation_column"},
    ),
    "choices_column": (
        {"context_column": "prompt", "choices_column": "texts"},
        {"context_column": "prompt", "choices_column": "more"},
        {"choices_column"},
    ),
    "label_column": (
        {"context_column": "prompt", "choices_column": "texts"},
        {"context_column": "prompt", "choices_column": "texts", "label_column": "id"},
        {"label_column"},
    ),
    "pmi": (
        {"context_column": "prompt", "choices_column": "texts"},
        {"context_column": "prompt", "choices_column": "texts", "pmi": True},
        {"pmi"},
    ),
    "token_logprobs": (
        {"text_column": "prompt"},
        {"text_column": "prompt", "token_logprobs": True},
        {"token_logprobs"},
    ),
}
"Each field of Scoring: how rows are scored, how else, and the names that then differ."

EXEMPT = {
    "engine": "another engine needs a model of its own, and has a test of its own",
    "revision": "only a hub's model has any, and then other files: seen through their hashes",
    "tokenizer": "seen through the hashes of its files",
    "allow_pickle": "says what may be loaded; what is loaded is seen through its hash",
    "compile": "is refused on the CPU that is here; what was asked is seen",
    "device": "auto is the CPU here, and cuda needs a GPU; what it was settled to be is seen",
    "kernels": "what they were settled to be is seen; the echo engine has none",
}
"Fields whose change alone is not seen, and why. Each has a test below."

# Values that ask for what is done anyway: the usual job, or the torch job where a model is needed.
NEUTRAL: dict[str, dict[str, object]] = {
    "all columns by name": {"keep": ("id", "prompt", "other", "ids", "texts", "more")},
    "one column twice": {"keep": ("id", "prompt", "other", "ids", "texts", "more", "id")},
    "a limit beyond the rows": {"limit": 100},
    "the model's own length": {"max_model_len": 8192},
    "rows per shard as they would be": {"rows_per_shard": 4},
    "top_k off": {"top_k": 0},
    "neutral sampling": {"min_new_tokens": 0, "top_p": 1.0, "repetition_penalty": 1},
    "the type that auto is": {"dtype": "float32"},
    "the device that auto is": {"device": "cpu"},
    "kernels of what has none": {"kernels": "compiled"},
    "a revision of what has none": {"revision": "v1"},
    "a tokenizer where there is none": {"tokenizer": "other"},
    "pickle allowed where there is none": {"allow_pickle": True},
}


def write_input(path: Path, num_rows: int = 3) -> Path:
    texts = ["abc", "de", "f", "gh"][:num_rows]
    ids = pa.array([list(text.encode()) for text in texts], pa.list_(pa.int64()))
    lists = pa.array([["a", "b"]] * num_rows)
    return write_prompts(path, texts, other=texts[::-1], ids=ids, texts=lists, more=lists)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_input(tmp_path / "in.parquet")


@pytest.fixture
def model(tmp_path: Path, models: dict[str, str]) -> Path:
    """A folder with a model and a tokenizer, to be changed."""
    return Path(shutil.copytree(models["emoji"], tmp_path / "model"))


def usual_job(source: Path, output: Path, **settings: object) -> Job:
    """A job on the echo engine; settings go to the dataclass that has them."""
    fields = {"path": "echo", "engine": "echo", "prompt_column": "prompt", **settings}
    names = ModelRef.__dataclass_fields__
    reference = ModelRef(**{name: fields.pop(name) for name in names if name in fields})
    return make_job(source, output, reference, **fields)


def torch_job(source: Path, model: Path | str, output: Path, **settings: object) -> Job:
    """The same on a model of files."""
    return usual_job(source, output, path=str(model), engine="torch", **settings)


def describe(job: Job) -> Intent:
    return describe_job(make_plan(job))


def differences(then: Job, now: Job) -> list[str]:
    return find_differences(describe(then).identity, describe(now).identity)


def names(differences: Sequence[str]) -> set[str]:
    return {difference.split(" was ")[0] for difference in differences}


def refused(job: Job) -> str:
    """What is said when a job wants to go on in the folder of its name."""
    with pytest.raises(RefusedError) as caught:
        refuse_other_job(job.output, describe(job))
    return str(caught.value)


def resumed(job: Job) -> None:
    """Raises RefusedError if a job may not go on in the folder of its name."""
    refuse_other_job(job.output, describe(job))


def parts_of(plan: Plan) -> list[bytes]:
    """The bytes of all parts of a plan, run in this process."""
    run_plan(plan)
    return [Path(path).read_bytes() for path in list_parts(plan.job.output)]


def edit_one_byte(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_what_computes_attention_is_seen_as_it_was_settled(
    source: Path, model: Path, tmp_path: Path
) -> None:
    def job(kernels: str) -> Job:
        return torch_job(source, model, tmp_path / "out", kernels=kernels)

    assert names(differences(job("compiled"), job("torch"))) == {"kernels"}
    assert differences(job("auto"), job("compiled")) == []


def test_every_field_of_a_job_is_changed_below_or_exempt_with_a_reason() -> None:
    assert set(CHANGES) | set(EXEMPT) | set(SCORED) == FIELDS
    assert not set(CHANGES) & set(EXEMPT)


@pytest.mark.parametrize("field", SCORED)
def test_whatever_can_change_a_score_is_found_and_named(
    tmp_path: Path, source: Path, field: str
) -> None:
    before, after, expected = SCORED[field]

    def job(scoring: dict[str, object]) -> Job:
        return usual_job(source, tmp_path / "out", prompt_column=None, scoring=Scoring(**scoring))

    assert before.get(field) != after[field]
    assert names(differences(job(before), job(after))) == expected


def test_to_score_is_another_job_than_to_answer(tmp_path: Path, source: Path) -> None:
    scored = usual_job(
        source, tmp_path / "out", prompt_column=None, scoring=Scoring(text_column="prompt")
    )

    assert "kind" in names(differences(usual_job(source, tmp_path / "out"), scored))


@pytest.mark.parametrize("field", CHANGES)
def test_whatever_can_change_a_byte_is_found_and_named(
    tmp_path: Path, source: Path, field: str
) -> None:
    """Case J02."""
    changed, expected = CHANGES[field]
    then = usual_job(source, tmp_path / "out")
    now = usual_job(source, tmp_path / "out", **changed)
    assert then != now

    found = differences(then, now)

    assert names(found) == expected
    assert describe(then).job["fingerprint"] != describe(now).job["fingerprint"]


@pytest.mark.parametrize("case", NEUTRAL)
def test_what_asks_for_the_same_is_the_same_job_with_the_same_bytes(
    tmp_path: Path, source: Path, case: str
) -> None:
    then = usual_job(source, tmp_path / "then")
    now = usual_job(source, tmp_path / "now", **NEUTRAL[case])

    assert differences(then, now) == []
    assert describe(then).job["fingerprint"] == describe(now).job["fingerprint"]
    assert parts_of(prepared(then)) == parts_of(prepared(now))


def test_stop_ids_are_a_set(tmp_path: Path, source: Path) -> None:
    then = usual_job(source, tmp_path / "then", stop_token_ids=(1, 2))
    now = usual_job(source, tmp_path / "now", stop_token_ids=(2, 1, 2))

    assert differences(then, now) == []
    assert parts_of(prepared(then)) == parts_of(prepared(now))


def test_columns_in_another_order_are_another_job(tmp_path: Path, source: Path) -> None:
    then = usual_job(source, tmp_path / "out", keep=("id", "other"))
    now = usual_job(source, tmp_path / "out", keep=("other", "id"))

    assert differences(then, now) == [
        'kept_columns was ["id", "other"], is now ["other", "id"]',
    ]


def test_another_engine_is_another_job(tmp_path: Path, source: Path, model: Path) -> None:
    then = usual_job(source, tmp_path / "out", path=str(model))
    now = torch_job(source, model, tmp_path / "out")

    found = differences(then, now)

    assert {"engine", "model", "architecture", "version of transformers"} <= names(found)


def test_compiling_is_seen(tmp_path: Path, source: Path) -> None:
    plan = make_plan(usual_job(source, tmp_path / "out"))
    model = dataclasses.replace(plan.job.model, compile=True)

    found = find_differences(
        describe_job(plan).identity,
        describe_job(
            dataclasses.replace(plan, job=dataclasses.replace(plan.job, model=model))
        ).identity,
    )

    assert found == ["compile was false, is now true"]


def test_a_device_is_seen_as_it_was_settled(tmp_path: Path, source: Path) -> None:
    plan = make_plan(usual_job(source, tmp_path / "out"))

    found = find_differences(
        describe_job(plan).identity,
        describe_job(dataclasses.replace(plan, device="cuda")).identity,
    )

    assert found == ['device was "cpu", is now "cuda"']


@pytest.mark.parametrize("name", ["revision", "allow_pickle"])
def test_what_says_how_to_find_a_model_changes_nothing_of_one_that_is_found(
    tmp_path: Path, source: Path, model: Path, name: str
) -> None:
    then = torch_job(source, model, tmp_path / "then")
    now = torch_job(source, model, tmp_path / "now", **{name: "v1" if name == "revision" else True})

    assert differences(then, now) == []
    assert parts_of(prepared(then)) == parts_of(prepared(now))


def test_pickled_weights_are_seen_through_their_hash(
    tmp_path: Path, source: Path, model: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save(weights, model / "pytorch_model.bin")
    job = torch_job(source, model, tmp_path / "out", allow_pickle=True)
    prepared(job)
    resumed(job)

    weights["lm_head.weight"][0, 0] += 1
    torch.save(weights, model / "pytorch_model.bin")

    assert "model file pytorch_model.bin was" in refused(job)


def test_another_tokenizer_is_seen_through_its_files(tmp_path: Path, source: Path) -> None:
    following = [(i + 1) % 258 for i in range(258)]
    model = save(table_model(following), tmp_path / "m", tokenizer=byte_tokenizer())
    byte_tokenizer(bos=True).save_pretrained(tmp_path / "t")
    then = torch_job(source, model, tmp_path / "out")

    own = torch_job(source, model, tmp_path / "out", tokenizer=model)
    other = torch_job(source, model, tmp_path / "out", tokenizer=str(tmp_path / "t"))

    assert differences(then, own) == []
    assert "model file tokenizer.json (2)" in names(differences(then, other))
    before = describe(other).identity
    path = tmp_path / "t" / "tokenizer_config.json"
    path.write_text(path.read_text() + "\n")
    assert names(find_differences(before, describe(other).identity)) == {
        "model file tokenizer_config.json (2)",
    }  # fmt: skip


def test_another_revision_of_a_hub_model_is_seen_through_its_files(
    tmp_path: Path, source: Path, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a cache as the hub's client leaves it, without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    store = tmp_path / "models--some--model"
    cache_revision(store, "v1", "1" * 40, Path(models["emoji"]))
    changed = Path(shutil.copytree(models["emoji"], tmp_path / "changed"))
    edit_one_byte(changed / "model.safetensors")
    cache_revision(store, "v2", "2" * 40, changed)
    cache_revision(store, "same", "3" * 40, Path(models["emoji"]))
    then = torch_job(source, "some/model", tmp_path / "out", revision="v1")

    now = torch_job(source, "some/model", tmp_path / "out", revision="v2")
    same = torch_job(source, "some/model", tmp_path / "out", revision="same")
    local = torch_job(source, models["emoji"], tmp_path / "out")

    assert names(differences(then, now)) == {"model file model.safetensors"}
    assert differences(then, same) == []
    assert differences(then, local) == []


def cache_revision(store: Path, revision: str, commit: str, model: Path) -> None:
    """Weights lie under their SHA-256, which the hub's client has checked; small files do not."""
    snapshot = store / "snapshots" / commit
    for folder in (store / "blobs", store / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (store / "refs" / revision).write_text(commit)
    for path, digest in hash_files([str(path) for path in model.iterdir()]).items():
        name = path.removeprefix("model file ")
        blob = (
            store / "blobs" / (str(digest) if name.endswith(".safetensors") else f"{commit}{name}")
        )
        shutil.copy(model / name, blob)
        (snapshot / name).symlink_to(blob)


def test_a_hub_file_is_not_read_for_its_hash(tmp_path: Path) -> None:
    """Weights of 100 GB would take minutes; their name in the cache is their hash."""
    digest = "0123456789abcdef" * 4
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / digest).write_text("not what the name says")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / digest)

    named = hash_files([str(tmp_path / "model.safetensors")])

    assert named == {"model file model.safetensors": digest}


@pytest.mark.parametrize("flag", ELSEWHERE, ids=lambda flag: flag.field)
def test_where_a_job_runs_is_no_part_of_it(flag: Flag) -> None:
    values: dict[str, object] = {f.key: () if f.multiple else default(f) for f in FLAGS}
    values |= {"model": "demo", "max_new_tokens": 3}
    changed = {"address": "host:1", "max_errors": "5%"}.get(flag.field, 1)

    then, *there = read_job("run", "in", "out", values)
    now, *here = read_job("run", "in", "out", values | {flag.key: changed})

    assert there != here
    assert then == now


def default(flag: Flag) -> object:
    [field] = [f for f in dataclasses.fields(flag.owner) if f.name == flag.field]
    return None if field.default is dataclasses.MISSING else field.default


def test_the_names_of_where_a_job_runs_are_not_in_its_identity(
    tmp_path: Path, source: Path
) -> None:
    identity = describe(usual_job(source, tmp_path / "out")).identity

    assert not {flag.field for flag in ELSEWHERE} & set(identity)


def test_the_same_job_may_go_on(tmp_path: Path, source: Path, model: Path) -> None:
    job = torch_job(source, model, tmp_path / "out", logprobs=2, temperature=0.7)
    prepared(job)

    resumed(job)


def test_a_difference_is_said_with_both_values_and_the_remedy(tmp_path: Path, source: Path) -> None:
    prepared(usual_job(source, tmp_path / "out"))

    said = refused(usual_job(source, tmp_path / "out", temperature=0.7, keep=("id",)))

    assert said == (
        f"{tmp_path}/out: holds rows of another job, and the two must not mix: temperature was "
        '0.0, is now 0.7; kept_columns was ["id", "prompt", "other", "ids", "texts", "more"], is '
        'now ["id"]. Give '
        "what was given then, choose a new folder, or delete this one's rows with --overwrite."
    )


def test_many_differences_are_counted(tmp_path: Path, source: Path) -> None:
    prepared(usual_job(source, tmp_path / "out"))

    said = refused(
        usual_job(source, tmp_path / "out", temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, seed=1,
                  max_new_tokens=5, min_new_tokens=1, logprobs=2, ignore_eos=True, limit=2)
    )  # fmt: skip

    assert said.count(", is now ") == 8
    assert "; and 2 more. Give" in said


def test_what_one_job_has_and_the_other_has_not_is_said() -> None:
    assert find_differences({"a": 1, "b": None}, {"b": None, "c": "x"}) == [
        "a was 1, is now not there",
        'c was not there, is now "x"',
    ]


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (list(range(100)), [*range(99), 0]),
        ({"x" * 70: 1}, {"x" * 70: 2}),
        ("a" * 100, "a" * 99 + "b"),
    ],
    ids=["list", "record", "text"],
)
def test_long_values_that_differ_are_not_shown_as_the_same(then: object, now: object) -> None:
    """A value that was cut where both are equal still would say nothing."""
    [said] = find_differences({"name": then}, {"name": now})

    before, after = said.removeprefix("name was ").split(", is now ")
    assert before != after


def test_other_versions_of_what_computes_are_another_job(tmp_path: Path, source: Path) -> None:
    job = usual_job(source, tmp_path / "out")
    intent = describe_job(prepared(job))
    for name in ("batchwright", "numpy", "pyarrow", "torch"):
        identity = intent.job["identity"] | {f"version of {name}": "0.0.1"}
        write_intent(job.output, Intent({**intent.job, "identity": identity}, intent.plan))

        assert f'version of {name} was "0.0.1", is now ' in refused(job)


def test_an_input_file_that_was_touched_is_named_with_what_differs(
    tmp_path: Path, source: Path
) -> None:
    """Part of case J02: nothing but its time tells a file that was written anew."""
    job = usual_job(source, tmp_path / "out")
    prepared(job)
    then = source.stat().st_mtime_ns

    os.utime(source, ns=(then, then + 1_000_000_007))

    said = f"input file in.parquet: mtime_ns was {then}, is now {then + 1_000_000_007}. Give what"
    assert said in refused(job)


def keep_two_rows(source: Path) -> None:
    write_input(source, num_rows=2)


def write_other_row_groups(source: Path) -> None:
    pq.write_table(pq.read_table(source), source, row_group_size=1)


def shrink_ids(source: Path) -> None:
    table = pq.read_table(source)
    pq.write_table(table.set_column(0, "id", table["id"].cast("int32")), source)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (keep_two_rows, {"rows", "num_rows", "size_bytes"}),
        (write_other_row_groups, {"num_row_groups", "size_bytes"}),
        (shrink_ids, {"column_types: id", "size_bytes"}),
    ],
)
def test_an_input_file_that_was_written_otherwise_is_named_with_what_differs(
    tmp_path: Path, source: Path, change: Callable[[Path], None], expected: set[str]
) -> None:
    job = usual_job(source, tmp_path / "out")
    then = describe_job(prepared(job)).identity
    stat = source.stat()

    change(source)
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    found = names(find_differences(then, describe(job).identity))
    assert {name.removeprefix("input file in.parquet: ") for name in found} == expected


def test_input_files_that_come_go_or_change_their_name_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for name in ("a", "b"):
        write_input(folder / f"{name}.parquet")
    job = usual_job(folder, tmp_path / "out", rows_per_shard=4)
    then = describe_job(prepared(job)).identity

    def changed() -> set[str]:
        return names(find_differences(then, describe(job).identity))

    write_input(folder / "c.parquet")
    assert changed() == {"rows", "input file c.parquet"}
    (folder / "c.parquet").unlink()
    assert changed() == set()
    (folder / "b.parquet").rename(folder / "d.parquet")
    assert changed() == {"input file b.parquet", "input file d.parquet"}
    (folder / "d.parquet").unlink()
    assert changed() == {"rows", "input file b.parquet"}


@pytest.mark.parametrize("name", ["in.parquet", "in"])
def test_input_that_has_moved_is_the_same(tmp_path: Path, name: str) -> None:
    """Another mount, another folder, the same files."""
    if name == "in":
        write_input(tmp_path / "then" / "in" / "x" / "1.parquet")
        write_input(tmp_path / "then" / "in" / "y" / "1.parquet")
    else:
        write_input(tmp_path / "then" / "in.parquet")
    job = usual_job(tmp_path / "then" / name, tmp_path / "out")
    then = parts_of(prepared(job))

    shutil.move(tmp_path / "then", tmp_path / "now")

    moved = dataclasses.replace(job, input=str(tmp_path / "now" / name))
    resumed(moved)
    again = dataclasses.replace(moved, output=str(tmp_path / "again"))
    assert parts_of(prepared(again)) == then


def test_a_model_that_has_moved_is_the_same(tmp_path: Path, source: Path, model: Path) -> None:
    job = torch_job(source, model, tmp_path / "out")
    then = parts_of(prepared(job))

    moved = shutil.move(model, tmp_path / "other name")

    resumed(torch_job(source, moved, tmp_path / "out"))
    assert parts_of(prepared(torch_job(source, moved, tmp_path / "again"))) == then


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json",
     "tokenizer_config.json"],
)  # fmt: skip
def test_a_file_of_the_model_that_has_changed_is_named(
    tmp_path: Path, source: Path, model: Path, name: str
) -> None:
    """By what it holds: size and time stay as they were."""
    path = model / name
    if name.endswith(".json"):
        path.write_text(path.read_text() + " ")
    job = torch_job(source, model, tmp_path / "out")
    prepared(job)
    stat = path.stat()

    if name.endswith(".json"):
        path.write_text(path.read_text()[:-1] + "\n")
    else:
        edit_one_byte(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    assert path.stat().st_size == stat.st_size
    assert f"must not mix: model file {name} was " in refused(job)


def test_a_file_that_comes_to_the_model_is_named(tmp_path: Path, source: Path, model: Path) -> None:
    job = torch_job(source, model, tmp_path / "out")
    prepared(job)

    (model / "chat_template.jinja").write_text("{{ messages }}")

    assert "model file chat_template.jinja was not there, is now " in refused(job)


def test_defaults_that_the_model_brings_are_seen_by_their_own_names(
    tmp_path: Path, source: Path, model: Path
) -> None:
    job = torch_job(source, model, tmp_path / "out")
    then = describe_job(prepared(job)).identity
    path = model / "generation_config.json"

    path.write_text(json.dumps(json.loads(path.read_text()) | {"top_p": 0.5}))

    assert names(find_differences(then, describe(job).identity)) == {
        "model file generation_config.json", "top_p",
    }  # fmt: skip


def test_a_file_of_the_model_that_cannot_be_read_is_said(
    tmp_path: Path, source: Path, model: Path
) -> None:
    plan = make_plan(torch_job(source, model, tmp_path / "out"))
    (model / "config.json").unlink()

    with pytest.raises(ModelError, match=r"model: cannot be read: .*config\.json"):
        describe_job(plan)


def test_the_job_that_was_asked_can_be_read_back(tmp_path: Path, source: Path) -> None:
    job = Job(
        input=str(source),
        output=str(tmp_path / "out"),
        model=ModelRef(
            "some name", engine="echo", revision="v1", tokenizer="other", dtype="bfloat16",
            device="cpu", threads=2, trust_remote_code=True, allow_pickle=True,
        ),
        sampling=Sampling(
            5, min_new_tokens=1, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1,
            frequency_penalty=0.5, presence_penalty=-0.5, repetition_penalty=1.1, ignore_eos=True,
            stop_token_ids=(3, 1), seed=2**70,
        ),
        prompt_column="other", add_special_tokens="no", max_model_len=100, truncation="left",
        logprobs=2, output_logits=True, logits_dtype="float16", output_format="arrow",
        keep=("prompt", "id"), output_prefix="x_", limit=2,
        packing=Packing(8, 1000, rows_per_shard=3, logits_budget_bytes=10**9),
    )  # fmt: skip

    prepared(job)

    assert read_asked(job.output) == job
    resumed(read_asked(job.output))


def test_a_job_that_left_everything_open_can_be_read_back(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a"])
    job = Job(str(source), str(tmp_path / "out"), ModelRef("echo", engine="echo"), Sampling(3))

    prepared(job)

    assert read_asked(job.output) == job


def test_a_model_is_read_back_by_the_place_that_it_was_found_in(
    tmp_path: Path, source: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads it may stand in another folder."""
    monkeypatch.chdir(tmp_path)
    prepared(torch_job(Path("in.parquet"), "model", Path("out")))

    asked = read_asked(str(tmp_path / "out"))

    assert (asked.model.path, asked.input, asked.output) == (
        str(model), str(source), str(tmp_path / "out"),
    )  # fmt: skip


def test_what_is_read_back_is_what_was_written(tmp_path: Path, source: Path) -> None:
    job = usual_job(source, tmp_path / "out", stop_token_ids=(3, 1), temperature=1 / 3)
    plan = prepared(job)
    intent = describe_job(plan)

    again = read_intent(job.output)

    assert find_differences(intent.identity, again.identity) == []
    assert again.job["fingerprint"] == intent.job["fingerprint"]
    assert again.plan == {
        "num_rows": 3, "shards": [[0, 3]], "files": intent.plan["files"],
        "schema": intent.plan["schema"],
    }  # fmt: skip


BROKEN: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "nothing asked": lambda job, plan: job.pop("asked"),
    "null asked": lambda job, plan: job.update(asked=None),
    "no identity": lambda job, plan: job.pop("identity"),
    "null identity": lambda job, plan: job.update(identity=None),
    "no files": lambda job, plan: plan.pop("files"),
    "a file without a path": lambda job, plan: plan["files"][0].pop("path"),
    "no shards": lambda job, plan: plan.pop("shards"),
    "no schema": lambda job, plan: plan.pop("schema"),
    "a schema that is none": lambda job, plan: plan.update(schema="AAAA"),
    "a schema that is no text": lambda job, plan: plan.update(schema=7),
    "all empty": lambda job, plan: (job.clear(), plan.clear()),
}


@pytest.mark.parametrize("case", BROKEN)
def test_nothing_goes_on_in_the_folder_of_another_version(
    tmp_path: Path, source: Path, case: str
) -> None:
    job = usual_job(source, tmp_path / "out")
    intent = describe_job(prepared(job))
    said, planned = dict(intent.job), dict(intent.plan)

    BROKEN[case](said, planned)
    write_intent(job.output, Intent(said, planned))

    for read in (read_intent, read_asked, lambda folder: resumed(job)):
        with pytest.raises(OutputError) as caught:
            read(job.output)
        assert another_version(tmp_path / "out", str(caught.value))


def another_version(folder: Path, said: str) -> bool:
    start = f"{folder}: {JOB} and {PLAN} are from another version, or damaged: "
    return said.startswith(start) and said.endswith(". Start afresh in another folder.")


@pytest.mark.parametrize(
    "change",
    [
        {"input": None}, {"model": {}}, {"model": None}, {"unheard_of": 1}, {"keep": 7},
        {"packing": {"rows_per_batch": "many"}}, {"sampling": {"max_new_tokens": None}},
        {"sampling": []},
    ],
    ids=str,
)  # fmt: skip
def test_a_job_that_was_asked_of_another_version_is_not_read_back(
    tmp_path: Path, source: Path, change: dict[str, object]
) -> None:
    job = usual_job(source, tmp_path / "out")
    intent = describe_job(prepared(job))

    write_intent(job.output, Intent({**intent.job, "asked": {**intent.job["asked"], **change}},
                                    intent.plan))  # fmt: skip

    with pytest.raises(OutputError) as caught:
        read_asked(job.output)
    assert another_version(tmp_path / "out", str(caught.value))


@pytest.mark.parametrize("name", [JOB, PLAN])
@pytest.mark.parametrize("text", ["[]", "null", "7"])
def test_what_is_no_record_at_all_is_said(
    tmp_path: Path, source: Path, name: str, text: str
) -> None:
    job = usual_job(source, tmp_path / "out")
    prepared(job)

    (tmp_path / "out" / name).write_text(text)

    with pytest.raises(OutputError):
        read_intent(job.output)


def test_a_folder_without_a_job_is_said(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="not the output of a job"):
        read_asked(str(tmp_path))
