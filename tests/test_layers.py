"""The house stays as it was drawn: imports go down only, and each heavy library has its folder."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BELOW = {
    "runner": {"runner", "cluster", "workers", "jobs"},
    "cluster": {"cluster", "workers", "jobs"},
    "workers": {"workers", "jobs"},
    "jobs": {"jobs"},
}
LIBRARIES = {
    "click": {"runner"},
    "rich": {"runner"},
    "pandas": {"runner"},
    "ray": {"cluster"},
    "torch": {"workers"},
    "transformers": {"workers"},
    "tokenizers": {"workers"},
    "safetensors": {"workers"},
    "huggingface_hub": {"workers"},
    "pyarrow": {"jobs", "runner"},
    "lm_eval": {"workers"},
}
"""pyarrow in runner: show.py hands tables from jobs to pandas, manifest.py keeps a schema."""
FILES = sorted(path for folder in BELOW for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield str(node.module)


def folder_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    for name in imports(path):
        top = name.split(".")[0]
        if top in BELOW:
            assert top in BELOW[folder_of(path)], f"{path} imports {name}"
        assert folder_of(path) in LIBRARIES.get(top, {folder_of(path)}), f"{path} imports {name}"


def test_pandas_stands_in_one_file() -> None:
    users = [path.name for path in FILES if "pandas" in {n.split(".")[0] for n in imports(path)}]

    assert users == ["show.py"]


def test_the_harness_stays_optional() -> None:
    """It is an extra: one file uses it, which nobody else imports."""
    users = [path.name for path in FILES if "lm_eval" in {n.split(".")[0] for n in imports(path)}]

    assert users == ["lm_eval.py"]
    assert not [path for path in FILES if "workers.lm_eval" in imports(path)]


def test_the_runner_knows_of_workers_by_name_alone() -> None:
    """It asks engines what they know, and for rows again; it never holds one, nor a tensor."""
    allowed = {"workers.engine", "workers.rerun"}

    for path in (ROOT / "runner").rglob("*.py"):
        used = {name for name in imports(path) if name.startswith("workers")}
        assert used <= allowed, f"{path} imports {used - allowed}"


def test_the_model_knows_of_no_job_and_no_arrow() -> None:
    allowed = {
        "jobs.completion", "jobs.errors", "jobs.model", "jobs.sampling", "jobs.scoring",
    }  # fmt: skip

    for path in (ROOT / "workers" / "model").rglob("*.py"):
        used = {name for name in imports(path) if name.startswith("jobs")}
        assert used <= allowed, f"{path} imports {used - allowed}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_say_what_they_are_for_and_are_short(path: Path) -> None:
    text = path.read_text("utf-8")

    assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"
    assert len(text.splitlines()) <= 230 or path.name == "generate.py", (
        f"{path} holds more than one idea"
    )


def test_no_class_of_ours_inherits_from_another_errors_excepted() -> None:
    ours: dict[str, Path] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                ours[node.name] = path
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.endswith("Error"):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                assert not bases & set(ours), f"{path}: {node.name} inherits from {bases}"


def test_files_that_fit_nowhere_have_not_been_named_yet() -> None:
    banned = {"utils", "common", "base", "helpers", "core", "types", "misc"}

    assert not banned & {path.stem for path in FILES}


def test_init_files_hold_a_docstring_and_nothing_else() -> None:
    """But for the two tables, KINDS and COLUMNS."""
    for path in FILES:
        if path.name == "__init__.py" and path.parent.name not in ("kinds", "columns"):
            body = ast.parse(path.read_text("utf-8")).body
            assert len(body) == 1, f"{path} holds code"


def test_nothing_below_the_command_prints_or_exits() -> None:
    for path in FILES:
        if folder_of(path) == "runner":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("print", "exit"), f"{path} prints"


def test_only_session_and_cli_read_the_environment() -> None:
    for path in FILES:
        if "os.environ" in path.read_text("utf-8") or "getenv" in path.read_text("utf-8"):
            assert path.name in ("session.py", "cli.py"), f"{path} reads the environment"
