"""What a job may be: a bad value stops here, in the user's words."""

import pickle

import pytest

from jobs.errors import JobError, SettingError
from jobs.job import Job, Packing
from jobs.model import ModelFacts, ModelRef, settle_dtype
from jobs.plan import plan_shards, settle_rows_per_shard
from jobs.sampling import Sampling, SamplingDefaults


def make(**settings: object) -> Job:
    return Job(
        **{
            "input": "in",
            "output": "out",
            "model": ModelRef("demo"),
            "sampling": Sampling(max_new_tokens=4),
        }
        | settings
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sampling": Sampling(0)}, "max_new_tokens must be at least 1, got 0."),
        ({"sampling": Sampling(4, temperature=3)}, "temperature must be between 0 and 2, got 3."),
        ({"sampling": Sampling(4, top_k=1.5)}, "top_k must be an integer, got 1.5."),
        ({"logprobs": -1}, "logprobs must be at least 0, got -1."),
        ({"limit": -1}, "limit must be at least 0, got -1."),
        ({"max_model_len": 1}, "max_model_len must be at least 2, got 1."),
        ({"model": ModelRef("demo", threads=0)}, "threads_per_worker must be at least 1, got 0."),
        ({"packing": Packing(rows_per_batch=0)}, "rows_per_batch must be at least 1, got 0."),
        (
            {"packing": Packing(logits_budget_bytes=0)},
            "logits_budget must be at least 1, got 0.",
        ),
        (
            {"prompt_column": "a", "token_ids_column": "b"},
            "prompt_column and token_ids_column are both given: 'a' and 'b'. Give one.",
        ),
    ],
)
def test_bad_values_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(SettingError) as caught:
        make(**settings)

    assert str(caught.value) == words


def test_errors_survive_the_way_from_a_worker() -> None:
    for kind in [JobError, *JobError.__subclasses__()]:
        error = pickle.loads(pickle.dumps(kind("in.parquet: no column 'prompt'.")))
        assert type(error) is kind
        assert str(error) == "in.parquet: no column 'prompt'."


def test_shards_cover_all_rows_once_in_order() -> None:
    shards = plan_shards(10, 4)

    assert [(s.index, s.start, s.stop, s.num_rows) for s in shards] == [
        (0, 0, 4, 4), (1, 4, 8, 4), (2, 8, 10, 2),
    ]  # fmt: skip


def test_no_rows_make_one_empty_shard() -> None:
    assert [(s.start, s.stop) for s in plan_shards(0, 4)] == [(0, 0)]


@pytest.mark.parametrize(
    ("num_rows", "rows_per_shard"),
    [(1, 64), (164, 64), (4096, 64), (4097, 128), (200_000, 1024), (10**9, 1024)],
)
def test_shards_grow_with_the_input_up_to_sixteen_batches(
    num_rows: int, rows_per_shard: int
) -> None:
    assert settle_rows_per_shard(make(), num_rows, 0) == rows_per_shard


def test_shards_with_logits_hold_one_budget_of_them() -> None:
    job = make(packing=Packing(logits_budget_bytes=1000))

    assert settle_rows_per_shard(job, 164, 100) == 10
    assert settle_rows_per_shard(job, 164, 999) == 1


def test_the_shard_size_asked_for_is_taken() -> None:
    assert settle_rows_per_shard(make(packing=Packing(rows_per_shard=7)), 10**6, 10**9) == 7


def test_auto_is_float32_on_a_cpu_and_the_checkpoints_own_on_a_gpu() -> None:
    facts = ModelFacts("X", 5, 64, (), SamplingDefaults(), False, "bfloat16")

    assert settle_dtype(ModelRef("m"), facts, "cpu") == "float32"
    assert settle_dtype(ModelRef("m"), facts, "cuda") == "bfloat16"
    assert settle_dtype(ModelRef("m", dtype="float16"), facts, "cpu") == "float16"
