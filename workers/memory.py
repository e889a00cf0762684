"""Running out of memory: telling it from other errors, and giving back what is held for later."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

from jobs.completion import RowError
from jobs.errors import JobError, MemoryShortError

if TYPE_CHECKING:  # A plan knows of Arrow, which generate() runs without.
    from jobs.plan import Shard

_SIGNS = ("allocate memory", "not enough memory", "out of memory")
"What torch and its libraries say where they raise a plain RuntimeError."


def is_out_of_memory(error: Exception) -> bool:
    """True if more memory would have helped, of the machine or of a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def free_memory() -> None:
    """Gives back what nobody holds any more, and what allocators keep for later."""
    gc.collect()
    with suppress(AttributeError, OSError):  # Another C library than GNU's.
        ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def row_too_big() -> RowError:
    """The error of a row that does not fit even alone."""
    message = "A batch of this row alone does not fit into memory."
    return RowError("generate", "out_of_memory", message, retryable=True)


@contextmanager
def memory_explained(shard: "Shard") -> Iterator[None]:
    """Turns every way to run out of memory into one error."""
    try:
        yield
    except JobError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # Not chained: the frames of what failed would hold the memory.
        raise MemoryShortError(f"shard {shard.index} is out of memory: {error}") from None
