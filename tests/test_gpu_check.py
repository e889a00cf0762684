"""The script for a GPU, as far as it can be seen without one."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tests" / "gpu_check.py"
ABSENT = {"ray", "pyarrow", "click", "rich", "pandas", "gguf"}
"What a GPU machine need not have."


def imported(path: Path) -> set[str]:
    """Modules that a file imports when it is loaded: not in functions, not for type checkers."""
    found: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_what_it_imports_needs_neither_ray_nor_arrow() -> None:
    todo, seen, outside = [SCRIPT], set(), set()
    while todo:
        path = todo.pop()
        seen.add(path)
        for name in imported(path):
            parts = name.split(".")
            packages = ["/".join(parts[:n]) + "/__init__.py" for n in range(1, len(parts))]
            files = [ROOT / f for f in (*packages, "/".join(parts) + ".py")]
            files.append(ROOT / "tests" / f"{name}.py")
            ours = [file for file in files if file.exists()]
            todo += [file for file in ours if file not in seen]
            if not ours:
                outside.add(parts[0])

    assert {path.name for path in seen} >= {"gpu_bench.py", "slotted.py", "generate.py"}
    assert "torch" in outside
    assert not outside & ABSENT


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it does without a GPU")
def test_without_a_gpu_nothing_is_checked_and_that_is_no_pass() -> None:
    result = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)

    assert (result.returncode, result.stdout) == (3, "no GPU here: nothing was checked\n")


@pytest.mark.slow
def test_a_rehearsal_runs_all_of_it_and_is_no_pass_either() -> None:
    """Slow: some seconds of tiny models. On a GPU the script must not fail of its own faults."""
    result = subprocess.run([sys.executable, SCRIPT, "--rehearse"], capture_output=True, text=True)

    assert result.returncode == 3, result.stdout + result.stderr
    assert "WRONG" not in result.stdout
    assert len(re.findall("^ok .* by graphs: off by", result.stdout, flags=re.M)) == 9
    assert "all checks are right\nthis was a rehearsal on a CPU" in result.stdout


@pytest.mark.slow
def test_a_rehearsal_of_a_wrong_attention_fails() -> None:
    """Keys are seen one place too far back by decode steps of rows that are long: no short probe
    can tell."""
    code = f"""
import runpy, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
sys.argv = ["gpu_check.py", "--rehearse", "--seconds", "0"]
from workers.model import slot_passes
true = slot_passes._interleave
def wrong(starts, stops):
    return true(starts, stops - (stops - starts > 15).long() * 3)
slot_passes._interleave = wrong
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert result.returncode == 1, result.stdout + result.stderr
    assert "WRONG Llama, torch.bfloat16, side by side, by graphs: off by" in result.stdout
