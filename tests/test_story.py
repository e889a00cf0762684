"""The story of a run, told by the code itself: four verbs, each calling the next."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STORY = [
    ("runner/run.py", "run_job", "run_shards"),
    ("cluster/pool.py", "run_shards", "_hand_out"),
    ("cluster/process.py", "run_shard", "run_shard"),
    ("workers/worker.py", "run_shard", "_write"),
    ("workers/worker.py", "_write", "_answer"),
    ("workers/worker.py", "_generate", "_run_beside"),
    ("workers/worker.py", "_run_beside", "_run"),
    ("workers/worker.py", "_run", "generate"),
    ("workers/worker.py", "_run", "score"),
]
RUN_JOB = [
    "check_output",
    "make_plan",
    "describe_job",
    "claim_output",
    "_find_finished",
    "connect",
    "check",
    "settle_seats",
    "hire_workers",
    "check",
    "_open_output",
    "run_shards",
    "_account",
]
ACCOUNT = [
    "check",
    "sweep_drafts",
    "check_parts",
    "_check_records",
    "write_manifest",
    "mark_success",
]


def calls_in(path: str, function: str) -> list[str]:
    """Names of what a function calls, in the order of the text."""
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    [body] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    calls = [node for node in ast.walk(body) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    return [
        call.func.id if isinstance(call.func, ast.Name) else call.func.attr
        for call in calls
        if isinstance(call.func, ast.Name | ast.Attribute)
    ]


@pytest.mark.parametrize(("path", "function", "called"), STORY)
def test_each_verb_calls_the_next(path: str, function: str, called: str) -> None:
    assert called in calls_in(path, function)


def test_the_pool_hands_shards_to_run_shard() -> None:
    assert "worker.run_shard.remote(shard" in (ROOT / "cluster/pool.py").read_text()


def test_a_run_checks_before_it_starts_and_starts_before_it_writes() -> None:
    told = [name for name in calls_in("runner/run.py", "run_job") if name in RUN_JOB]
    told.remove("_account")  # The way out where there is nothing to do.

    assert told == RUN_JOB


def test_a_folder_is_marked_as_whole_when_all_is_accounted_for() -> None:
    told = [name for name in calls_in("runner/run.py", "_account") if name in ACCOUNT]

    assert told == ACCOUNT


def test_ray_is_started_and_called_in_one_file_each() -> None:
    for call, home in (("ray.init(", "session.py"), ("ray.remote(", "pool.py")):
        users = [p.name for p in (ROOT / "cluster").glob("*.py") if call in p.read_text("utf-8")]
        assert users == [home]
