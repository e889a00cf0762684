"""Worker processes for benchmarks: each opens the demo model once and then runs what it is sent.

What a job does on one machine, without Ray and files: a process a worker, a thread each, the same
turns. Rows are dealt by length, so that workers end together as they do in a job of many shards.
"""

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jobs.completion import Capture
from jobs.job import Packing
from jobs.sampling import RowSampling
from jobs.scoring import ScoreRequest
from workers.generate import GenerateIterator, open_pipeline
from workers.model import ragged
from workers.pipeline import RowContext, ScoringPipeline
from workers.turns import Turns

Rows = list[list[int]]


@dataclass(frozen=True)
class Work:
    """What the workers are to do with their rows."""

    new_tokens: int
    rows_per_batch: int = Packing().rows_per_batch
    logprobs: int | None = None
    ignore_eos: bool = True
    shares_prefix: bool = True
    is_fixed: bool = False
    "Batches that end with their longest row, in place of turns."


class Team:
    """Workers of one thread each."""

    def __init__(self, num_workers: int, *, max_length: int, max_batch_size: int = 256) -> None:
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self.pids: list[int] = []
        for _ in range(num_workers):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, max_length, max_batch_size), daemon=True
            )
            process.start()
            assert process.pid is not None
            self._ends.append(mine)
            self.pids.append(process.pid)
        for end in self._ends:
            end.recv()

    def run(self, rows: Rows, work: Work) -> tuple[float, Rows]:
        """Seconds for all rows, and their answers."""
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        return self._share(_run, rows, [[row] for row in order], work)

    def score(self, requests: Sequence[ScoreRequest]) -> tuple[float, list[float]]:
        """Seconds for all requests, and their sums. Those behind one context stay together."""
        groups: dict[object, list[int]] = {}
        for row, request in enumerate(requests):
            context = request.token_ids[: request.num_context]
            groups.setdefault(context if len(context) > 1 else row, []).append(row)
        order = sorted(groups.values(), key=lambda rows: -len(requests[rows[0]].token_ids))
        return self._share(_score, requests, order)

    def _share(
        self, task: Callable[..., list[Any]], items: Sequence[Any], groups: Rows, *settings: object
    ) -> tuple[float, list[Any]]:
        """Deals groups of items out, and brings what comes of them into the items' order."""
        number = len(self._ends)
        shares = [[row for group in groups[k::number] for row in group] for k in range(number)]
        started = time.perf_counter()
        for end, share in zip(self._ends, shares, strict=True):
            end.send((task, [items[row] for row in share], *settings))
        replies = [end.recv() for end in self._ends]
        seconds = time.perf_counter() - started
        found = dict(
            pair for share, reply in zip(shares, replies, strict=True)
            for pair in zip(share, reply, strict=True)
        )  # fmt: skip
        return seconds, [found[row] for row in range(len(items))]

    def multiply_seconds(self, sizes: Iterable[tuple[int, int]]) -> list[tuple[float, float]]:
        """Seconds of all multiplies of the layers, and of the head, for each (tokens, heads).

        All workers measure at the same time, and the slowest counts.
        """
        asked = list(sizes)
        for end in self._ends:
            end.send((_multiply, asked))
        replies = [end.recv() for end in self._ends]
        return [(max(a for a, _ in s), max(b for _, b in s)) for s in zip(*replies, strict=True)]

    def close(self) -> None:
        for end in self._ends:
            end.send(None)


def _serve(end: Connection, max_length: int, max_batch_size: int) -> None:
    torch.set_num_threads(1)
    pipeline = open_pipeline(
        "demo",
        max_batch_size=max_batch_size,
        max_length=max_length,
        max_prefill_tokens=max_batch_size * max_length,
    )
    end.send("ready")
    while (order := end.recv()) is not None:
        task, *arguments = order
        end.send(task(pipeline, *arguments))


def _run(pipeline: object, rows: Rows, work: Work) -> Rows:
    sampling = RowSampling(work.new_tokens, temperature=0.0, ignore_eos=work.ignore_eos)
    contexts = [RowContext(tuple(row), sampling, 0) for row in rows]
    least_shared = ragged._LEAST_SHARED
    ragged._LEAST_SHARED = least_shared if work.shares_prefix else 10**9
    turns = None if work.is_fixed else Turns(work.rows_per_batch, 2**30)
    size = work.rows_per_batch if work.is_fixed else max(len(rows), 1)
    answers: Rows = []
    for start in range(0, len(contexts), size):
        with GenerateIterator.from_contexts(
            pipeline, contexts[start : start + size], capture=Capture(work.logprobs), turns=turns
        ) as batch:
            while not batch.done:
                batch.advance()
            answers += [batch.record.token_ids(row).tolist() for row in range(len(batch.sequences))]
    ragged._LEAST_SHARED = least_shared
    return answers


def _score(pipeline: ScoringPipeline, requests: Sequence[ScoreRequest]) -> list[float]:
    return [scores.loglikelihood for scores in pipeline.score(requests, 0)]


def _multiply(_: object, sizes: list[tuple[int, int]]) -> list[tuple[float, float]]:
    """The faster of PyTorch's two ways, for each size, at the shapes of the demo model."""
    layers = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
    with torch.inference_mode():
        weights = [[torch.randn(shape) for shape in layers] for _ in range(30)]
        head = torch.randn(49_152, 576)
        found = []
        for tokens, heads in sizes:
            layer_seconds = sum(
                _fastest([layer[place] for layer in weights], tokens) for place in range(4)
            )
            found.append((layer_seconds, _fastest([head], heads)))
    return found


def _fastest(weights: list[torch.Tensor], rows: int) -> float:
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in weights]
    x = torch.randn(rows, weights[0].shape[1])
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        for weight in packed:
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        middle = time.perf_counter()
        for weight in weights:
            nn.functional.linear(x, weight)
        best = min(best, middle - started, time.perf_counter() - middle)
    return best


class MemoryWatch:
    """Most memory that processes hold together, what they share counted once, in MB."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._stop = threading.Event()
        self.is_paused = False
        "Set while the processes do what is not to be counted."
        self.peak_mb = 0.0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            if not self.is_paused:
                self.peak_mb = max(self.peak_mb, sum(map(_held_mb, self._pids)))

    def close(self) -> float:
        self._stop.set()
        self._thread.join()
        return self.peak_mb


def _held_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) / 1000 for line in lines if line.startswith("Pss:"))
