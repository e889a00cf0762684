"""kernels.c, compiled once for this machine. Without a compiler PyTorch does what it would.

Plain C through ctypes, not an extension of torch: it builds in a second, with nothing but a
compiler, and one build serves every version of torch.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import cached_assets_path

from jobs.errors import ModelError

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.c")
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
_THREADS = ("-fopenmp",)
"Not every compiler has it. Without it one thread does all, with the same bits."


def has_kernels() -> bool:
    """True if they are compiled for this machine, or can be. Says why not, once for all."""
    try:
        ctypes.CDLL(str(build_kernels()))
    except (OSError, ModelError) as error:
        logger.info("attention runs in PyTorch alone, some tenths slower: %s", error)
        return False
    return True


def build_kernels() -> Path:
    """The compiled library, from the user's cache or made now.

    Raises ModelError if there is no compiler that can make it.
    """
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    key = hashlib.sha256(_SOURCE.read_bytes() + _processor().encode()).hexdigest()[:16]
    folder = cached_assets_path("batchwright", namespace="kernels")
    library = folder / f"{key}.so"
    if library.exists():
        return library
    if compiler is None:
        raise ModelError(
            f"no C compiler here ({', '.join(_COMPILERS)}). Install one, or use --kernels torch."
        )
    draft = folder / f".{key}.{os.getpid()}"
    try:
        _compile([compiler, *_FLAGS], _THREADS, draft)
        draft.rename(library)
    finally:
        draft.unlink(missing_ok=True)
    return library


def _compile(command: Sequence[str], extra: Sequence[str], draft: Path) -> None:
    """Compiles with the extra flags, or else without them."""
    for flags in (extra, ()):
        result = subprocess.run(
            [*command, *flags, "-o", str(draft), str(_SOURCE), "-lm"],
            capture_output=True,
            text=True,
        )
        if result.returncode == 0:
            return
    raise ModelError(
        f"{command[0]} cannot compile {_SOURCE.name}: {result.stderr.strip()[:200]}. Use "
        "--kernels torch."
    )


def _processor() -> str:
    """What a library that was compiled for this machine depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {flags} {' '.join(_FLAGS)}"
