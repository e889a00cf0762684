"""Decode steps captured as graphs of a GPU, for a ladder of batch sizes.

A step of n rows is replayed in the graph of the next size, filled up with pads: rows of one token
that nobody reads. What a graph reads and writes stays where it is; rows, and nothing else, are
copied in before each replay.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

logger = logging.getLogger(__name__)

Run: TypeAlias = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"Rows [3, n] to their logits [n, V] and best ids [n]."
Record: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
"Captures what a function launches. Returns what launches it again."


class DecodeGraphs:
    """The graphs of one pipeline. They share one pool of memory and one pair of outputs."""

    def __init__(self, run: Run, max_rows: int, pads_start: int, device: torch.device) -> None:
        """pads_start: where the cache has a token for each pad."""
        self._run = run
        self._sizes = ladder(max_rows)
        self._pads_start = pads_start
        self._device = device
        self._replays: dict[int, Callable[[], None]] = {}
        self._sent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        "By size, rows [3, size] in the machine's memory and on the device."
        self._outputs: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def is_ready(self) -> bool:
        """True if graphs of all sizes are captured."""
        return len(self._replays) == len(self._sizes)

    def capture(self, record: Record | None = None) -> bool:
        """Captures all sizes, the largest first, whose memory serves the others.

        False, and a word in the log, if a step cannot be captured: then steps run one by one.
        """
        try:
            record = record or CudaRecorder(self._device)
            for size in reversed(self._sizes):
                self._replays[size] = record(self._prepare(size))
        except RuntimeError as error:
            self._replays.clear()
            self._sent.clear()
            self._outputs = None
            reason = str(error).splitlines()[0]
            logger.warning("decode steps run without captured graphs, which is slower: %s", reason)
            return False
        logger.info("decode steps captured for %d to %d rows", self._sizes[0], self._sizes[-1])
        return True

    def replay(self, rows: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [n, V] and best ids [n] of rows [3, n], valid until the next replay.

        The caller reads what it needs of them before, so that the copy has ended, too.
        """
        num_rows = rows.shape[1]
        size = next(size for size in self._sizes if size >= num_rows)
        here, there = self._sent[size]
        here.numpy()[:] = pad_rows(rows, size, self._pads_start)
        there.copy_(here, non_blocking=True)
        self._replays[size]()
        assert self._outputs is not None, "no graph is captured"
        logits, best = self._outputs
        return logits[:num_rows], best[:num_rows]

    def _prepare(self, size: int) -> Callable[[], None]:
        """What one graph is to launch, after a step of pads alone has run."""
        pads = pad_rows(np.zeros((3, 0), np.int64), size, self._pads_start)
        here = torch.from_numpy(pads)
        if self._device.type == "cuda":
            here = here.pin_memory()
        there = here.to(self._device)
        self._sent[size] = here, there
        logits, best = self._run(there)
        if self._outputs is None:
            self._outputs = torch.empty_like(logits), torch.empty_like(best)
        outputs = self._outputs

        def launch() -> None:
            for output, result in zip(outputs, self._run(there), strict=True):
                output[:size].copy_(result)

        return launch


class CudaRecorder:
    """Captures what a function launches on a GPU."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise RuntimeError(f"graphs are captured on a GPU, not on {device}")
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, launch: Callable[[], None]) -> Callable[[], None]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # Libraries make their workspaces before a capture.
            launch()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            launch()
        replay: Callable[[], None] = graph.replay
        return replay


def ladder(most: int) -> Sequence[int]:
    """Sizes up to most: steps of an eighth or so, since each costs a capture."""
    sizes = [1, 2, 4]
    while sizes[-1] < most:
        last = sizes[-1]
        sizes.append(last + (4 if last < 8 else 8 if last < 64 else 16 if last < 256 else 32))
    return [*(size for size in sizes if size < most), most]


def pad_rows(rows: npt.NDArray[np.int64], size: int, pads_start: int) -> npt.NDArray[np.int64]:
    """[3, size]: the rows, then pads of one token each, behind all rows of the cache."""
    num_pads = size - rows.shape[1]
    pads = np.zeros((3, num_pads), np.int64)
    pads[2] = np.arange(pads_start, pads_start + num_pads)
    return np.concatenate([rows, pads], axis=1)
