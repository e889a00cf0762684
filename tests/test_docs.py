"""What the documents say is so: commands exist, trees match, columns and codes are all named."""

import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner
from running import echo_job, write_prompts

from jobs.completion import ErrorCode
from jobs.metrics import measure
from jobs.report import Counts
from jobs.schema import output_schema
from jobs.scoring import PREDICTIONS, Scoring
from runner.cli import batchwright
from runner.plan import make_plan

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]


def files_of_tree(text: str) -> set[str]:
    """Paths named by an indented tree, folders ending in a slash."""
    paths, parents = set(), [""]
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        parents[depth + 1 :] = [parents[depth] + name]
        paths.add(parents[depth] + name)
    return paths


def test_the_file_tree_is_that_of_the_disk() -> None:
    [tree] = re.findall(r"```\n(runner/.*?)```", README, flags=re.S)
    told = {path for path in files_of_tree(tree) if not path.endswith("/")}

    tops = ("runner", "cluster", "workers", "jobs", "examples", "tests")
    there = {
        str(path.relative_to(ROOT))
        for top in tops
        for path in (ROOT / top).rglob("*")
        if path.is_file() and path.name != "__init__.py" and "__pycache__" not in path.parts
    }
    assert told == there


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))

    for document in DOCUMENTS:
        text = document.read_text("utf-8")
        named = set(re.findall(r"(?:^    |`)make ([a-z-]+)", text, flags=re.M))
        assert named <= targets, document.name


def commands() -> list[str]:
    text = "\n".join(document.read_text("utf-8") for document in DOCUMENTS)
    return re.findall(r"^    batchwright (.*?)(?:\s+#.*)?$", text, flags=re.M)


@pytest.mark.parametrize("line", commands())
def test_commands_that_are_shown_can_be_parsed(
    line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Parsed by the command itself, which then refuses for want of the files."""
    monkeypatch.chdir(ROOT)

    result = CliRunner().invoke(batchwright, shlex.split(line))

    assert "no such option" not in result.output.lower()
    assert not isinstance(result.exception, SystemExit), result.output


def test_flags_that_are_named_exist() -> None:
    params = [param for command in batchwright.commands.values() for param in command.params]
    known = {name for param in params for name in (*param.opts, *param.secondary_opts)} | {"--help"}

    for document in DOCUMENTS:
        named = set(re.findall(r"`(--[a-z][a-z-]+)", document.read_text("utf-8")))
        assert named <= known, document.name


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text("utf-8")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_column_error_code_and_finish_reason_is_documented(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "output.md").read_text("utf-8")
    source = write_prompts(tmp_path / "in.parquet", ["a"])
    choices = write_prompts(tmp_path / "more.parquet", ["a"], choices=[["b"]])
    jobs = [
        echo_job(source, tmp_path / "o", logprobs=1, output_logits=True, prompt_logprobs=1),
        echo_job(source, tmp_path / "o", scoring=Scoring("prompt", token_logprobs=True)),
        echo_job(choices, tmp_path / "o", scoring=Scoring(context_column="prompt", pmi=True)),
    ]

    names = [name for job in jobs for name in output_schema(make_plan(job)).names]
    for name in {*names, *get_args(ErrorCode)} - {"id", "prompt", "choices"}:
        assert f"`{name}`" in text, name


def test_every_figure_of_a_set_is_documented() -> None:
    text = (ROOT / "docs" / "output.md").read_text("utf-8")
    counts = Counts(
        rows=2, scored_tokens=1, scored_bytes=1, scored_words=1,
        labelled=Counter(dict.fromkeys(PREDICTIONS, 1)),
    )  # fmt: skip

    for name in {**measure("continuations", counts), **measure("choices", counts)}:
        assert f"`{name}`" in text, name


def test_every_argument_of_generate_is_documented() -> None:
    import inspect

    from workers.generate import GenerateIterator, generate

    text = (ROOT / "docs" / "generate.md").read_text("utf-8")
    names = [name for name in inspect.signature(generate).parameters if name != "pipeline"]

    for name in names:
        assert f"`{name}`" in text, name
    ours, theirs = inspect.signature(generate), inspect.signature(GenerateIterator)
    assert [p for p in ours.parameters if p != "caller"] == [
        p for p in theirs.parameters if p != "caller"
    ]


def test_generate_has_the_signature_of_the_seed() -> None:
    import inspect

    from workers.generate import generate

    signature = inspect.signature(generate)
    defaults = {n: p.default for n, p in signature.parameters.items() if p.default is not p.empty}

    assert list(signature.parameters) == [
        "pipeline", "input_ids", "attention_mask", "max_new_tokens", "min_new_tokens",
        "temperature", "top_k", "top_p", "min_p", "frequency_penalty", "presence_penalty",
        "repetition_penalty", "ignore_eos", "stop_token_ids", "seed", "output_logits",
        "output_logprobs", "caller",
    ]  # fmt: skip
    assert {n: v for n, v in defaults.items() if v is not None} == {
        "ignore_eos": False, "seed": 0, "output_logits": False, "output_logprobs": 0,
        "caller": "generate()",
    }  # fmt: skip


@pytest.mark.slow
def test_the_python_of_the_readme_runs() -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", README, flags=re.S))
    claims = "assert len(result.sequences[0]) == 21 and paris.loglikelihood > rome.loglikelihood"

    subprocess.run(
        [sys.executable, "-c", f"{code}\n{claims}"],
        check=True,
        capture_output=True,
        cwd=ROOT,
    )


@pytest.mark.slow
def test_the_examples_run(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "examples/generate.py"], check=True, cwd=ROOT)
    target = tmp_path / "prompts.parquet"
    subprocess.run([sys.executable, "examples/humaneval_prompts.py", target], check=True, cwd=ROOT)
    assert target.exists()
