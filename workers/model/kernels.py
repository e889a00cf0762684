"""The functions of kernels.c: what stands between the multiplies of a step, over tensors."""

import ctypes
from pathlib import Path
from typing import Self

import torch

from jobs.errors import ModelError
from workers.model.build import build_kernels
from workers.model.shape import AttentionSettings
from workers.model.steps import DecodeStep, PromptSpan


class _Tensor(ctypes.Structure):
    """[heads, n, D]: where it starts, and its strides."""

    _fields_ = (
        ("start", ctypes.c_void_p),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
    )

    @classmethod
    def of(cls, x: torch.Tensor) -> Self:
        """The tensor must outlive the call."""
        return cls(x.data_ptr(), x.stride(0), x.stride(1))


class _Layer(ctypes.Structure):
    """How the queries of a layer attend."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("H", "G", "D", "E")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
        ("window", ctypes.c_int64),
    )

    @classmethod
    def of(
        cls,
        settings: AttentionSettings,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> Self:
        """query [G * H, n, D], key [H, n, D], value [H, n, E]."""
        num_heads, _, key_dim = query.shape
        return cls(
            len(key),
            num_heads // len(key),
            key_dim,
            value.shape[2],
            settings.scaling,
            settings.softcap or 0.0,
            settings.window or 0,
        )


def _with_whole_heads(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The same tensors, the numbers of a head side by side."""
    return [x if x.stride(2) == 1 else x.contiguous() for x in tensors]


class Kernels:
    """The compiled functions."""

    def __init__(self, library: Path) -> None:
        """Loads them. Raises OSError if the file is none that this machine can run."""
        functions = ctypes.CDLL(str(library))
        count, address, number = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
        threads, layer = ctypes.c_int, ctypes.POINTER(_Layer)
        tensors, addresses = [_Tensor] * 3, [address] * 3
        for name, arguments in {
            "decode": [layer, count, *tensors, address, address, count, *addresses, count, threads],
            "prompt": [layer, count, *tensors, address, address, count, address, count, threads],
            "gate": [count, count, address, address],
            "rotate": [count, count, count, address, count, count, address, address],
            "rms_norm": [count, count, address, address, number, address],
            "find_best": [count, count, address, address, address, threads],
            "log_mass": [count, count, address, address, address, threads],
            "find_top": [count, count, count, address, address, address, threads],
        }.items():  # fmt: skip
            getattr(functions, name).argtypes = arguments
        self._functions = functions

    def prompt(
        self,
        span: PromptSpan,
        layer: int,
        settings: AttentionSettings,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Stores a stretch of a prompt, and attends it to itself and to what is before it.

        float32 on a CPU. query [G * H, S, D], key and value [H, S, D]; output [S, G * H, D].
        """
        tensors = _with_whole_heads(query, key, value)
        self._functions.prompt(
            _Layer.of(settings, *tensors),
            span.num_tokens,
            *map(_Tensor.of, tensors),
            span.cache.pages.layers[layer].data_ptr(),
            span.cache.table[span.row].ctypes.data,
            span.start,
            output.data_ptr(),
            output.stride(0),
            torch.get_num_threads(),
        )

    def decode(
        self,
        step: DecodeStep,
        layer: int,
        settings: AttentionSettings,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Stores one token a row, and attends it to what its row has stored, into output.

        float32 on a CPU. query [G * H, n, D], key and value [H, n, D]; output [n, G * H, D].
        """
        tensors = _with_whole_heads(query, key, value)
        self._functions.decode(
            _Layer.of(settings, *tensors),
            step.num_tokens,
            *map(_Tensor.of, tensors),
            step.cache.pages.layers[layer].data_ptr(),
            step.cache.table.ctypes.data,
            step.cache.table.shape[1],
            step.rows.ctypes.data,
            step.written.data_ptr(),
            output.data_ptr(),
            output.stride(0),
            torch.get_num_threads(),
        )

    def rms_norm(self, x: torch.Tensor, gain: torch.Tensor, epsilon: float) -> torch.Tensor:
        """[..., K] over its root mean square, times gain [K]."""
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        self._functions.rms_norm(
            x.numel() // width, width, x.data_ptr(), gain.data_ptr(), epsilon, out.data_ptr()
        )
        return out

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Turns x [H, n, D] in place, by cos and sin [n, D], and returns it."""
        [x] = _with_whole_heads(x)
        heads, n, width = x.shape
        places = cos.data_ptr(), sin.data_ptr()
        self._functions.rotate(n, heads, width, x.data_ptr(), x.stride(0), x.stride(1), *places)
        return x

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., 2 * K], a gate and what it lets through: silu(gate) * rest [..., K]."""
        x = x.contiguous()
        width = x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], width)
        self._functions.gate(x.numel() // (2 * width), width, x.data_ptr(), out.data_ptr())
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
