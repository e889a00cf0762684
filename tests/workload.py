"""Prompts of real text for benchmarks: docstrings of the standard library, always the same cut."""

import ast
import random
import sysconfig
from pathlib import Path

from transformers import PreTrainedTokenizerBase


def docstrings() -> list[str]:
    """Long docstrings of the installed standard library, in file order."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_text("utf-8", errors="ignore"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) > 200:
                    found.append(text)
    return found


def prompts(tokenizer: PreTrainedTokenizerBase, count: int) -> list[list[int]]:
    """Token ids of prompts with log-normal lengths of 16 to 512 tokens."""
    generator = random.Random(0)
    text = "\n\n".join(docstrings())[:2_000_000]
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    rows = []
    for _ in range(count):
        length = min(512, max(16, round(generator.lognormvariate(4.4, 0.8))))
        start = generator.randrange(len(ids) - length)
        rows.append(ids[start : start + length])
    return rows
