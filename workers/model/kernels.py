"""The functions of kernels.c: what stands between the multiplies of a step, over tensors."""

import ctypes
from pathlib import Path

import torch

from jobs.errors import ModelError
from workers.model.build import build_kernels
from workers.model.shape import AttentionSettings
from workers.model.steps import DecodeStep


class _Tensor(ctypes.Structure):
    """[heads, n, D]: where it starts, and its strides."""

    _fields_ = (
        ("start", ctypes.c_void_p),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
    )


class Kernels:
    """The compiled functions."""

    def __init__(self, library: Path) -> None:
        """Loads them. Raises OSError if the file is none that this machine can run."""
        functions = ctypes.CDLL(str(library))
        count, address, number = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
        threads = ctypes.c_int
        for name, arguments in {
            "decode": [count] * 6 + [_Tensor] * 3 + [address] * 3 + [number, count, number]
            + [address, count, count, threads],
            "rms_norm": [count, count, address, address, number, address],
            "find_best": [count, count, address, address, address, threads],
            "log_mass": [count, count, address, address, address, threads],
            "find_top": [count, count, count, address, address, address, threads],
        }.items():  # fmt: skip
            getattr(functions, name).argtypes = arguments
        self._functions = functions

    def decode(
        self,
        step: DecodeStep,
        settings: AttentionSettings,
        keys: torch.Tensor,
        values: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Stores one token a row, and attends it to what its row has stored, into output.

        float32 on a CPU. keys and values [places, H, C, D] of the block; query [G * H, n, D], key
        and value [H, n, D]; output [n, G * H, D].
        """
        tensors = [x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value)]
        num_kv_heads, num_rows, _ = key.shape
        failed = self._functions.decode(
            num_rows,
            num_kv_heads,
            query.shape[0] // num_kv_heads,
            keys.shape[3],
            values.shape[3],
            keys.shape[2],
            *(_Tensor(x.data_ptr(), x.stride(0), x.stride(1)) for x in tensors),
            keys.data_ptr(),
            values.data_ptr(),
            step.written.data_ptr(),
            settings.scaling,
            settings.window or 0,
            settings.softcap or 0.0,
            output.data_ptr(),
            output.stride(0),
            step.longest,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("not enough memory for the scores of a token")

    def rms_norm(self, x: torch.Tensor, gain: torch.Tensor, epsilon: float) -> torch.Tensor:
        """[..., K] over its root mean square, times gain [K]."""
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        self._functions.rms_norm(
            x.numel() // width, width, x.data_ptr(), gain.data_ptr(), epsilon, out.data_ptr()
        )
        return out

    def find_best(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best of each row of z [n, V], NaN if one is no number, and the lowest id with it."""
        best = torch.empty(len(z))
        ids = torch.empty(len(z), dtype=torch.long)
        self._functions.find_best(
            *z.shape, z.data_ptr(), best.data_ptr(), ids.data_ptr(), torch.get_num_threads()
        )
        return best, ids

    def log_mass(self, z: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """[n], logsumexp of z - best, in nats."""
        mass = torch.empty(len(z))
        self._functions.log_mass(
            *z.shape, z.data_ptr(), best.data_ptr(), mass.data_ptr(), torch.get_num_threads()
        )
        return mass

    def find_top(self, z: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The highest values of each row and their ids [n, count], of equals the lowest id first.

        Time grows with count where the vocabulary is in ascending order: for short lists.
        """
        values = torch.empty(len(z), count)
        ids = torch.empty(len(z), count, dtype=torch.long)
        self._functions.find_top(
            *z.shape, count, z.data_ptr(), values.data_ptr(), ids.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return values, ids


def load_kernels() -> Kernels:
    """The compiled functions. Raises ModelError where they cannot be had."""
    try:
        return Kernels(build_kernels())
    except OSError as error:
        raise ModelError(
            f"the compiled attention cannot be loaded here: {error}. Use --kernels torch."
        ) from error
