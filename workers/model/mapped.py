"""Weights that lie in a mapped file: pages that nobody reads any more are given back.

They would count as held for as long as any other weight of the file is in use. If one of them is
read after all, the system reads it from the file again.
"""

import ctypes
import mmap
import re
from pathlib import Path

import torch

_MAPPINGS = Path("/proc/self/smaps")
_HEAD = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ [1-9]\d* +/", flags=re.MULTILINE)
"Of a mapping of a file: where it begins and ends."
_UNTOUCHED = re.compile(r"^Anonymous: +0 kB", flags=re.MULTILINE)
"Nothing was written to it, so that the file has all that it holds."


class MappedFiles:
    """The files that this process has mapped and not written to. None where Linux does not tell."""

    def __init__(self) -> None:
        text = _MAPPINGS.read_text("utf-8", "replace") if _MAPPINGS.exists() else ""
        # Every mapping begins with a line of its own, and then says what it holds.
        entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.MULTILINE)
        heads = [_HEAD.match(entry) for entry in entries if _UNTOUCHED.search(entry)]
        self._ranges = [(int(head[1], 16), int(head[2], 16)) for head in heads if head]

    def give_back(self, weight: torch.Tensor) -> int:
        """Gives back the whole pages of a weight. Returns their bytes: 0 if it is in no file."""
        start = weight.data_ptr()
        stop = start + weight.nbytes
        if not weight.is_contiguous() or not any(
            first <= start and stop <= last for first, last in self._ranges
        ):
            return 0
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        size = stop // mmap.PAGESIZE * mmap.PAGESIZE - start
        if size <= 0:
            return 0
        failed = ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED
        )
        return 0 if failed else size
