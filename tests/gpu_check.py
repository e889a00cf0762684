"""What only a GPU can show: the forward pass for it against a CPU's, and how fast it is.

    python tests/gpu_check.py [--rehearse] [--seconds 330]

It needs torch with CUDA and transformers, and neither Ray nor Arrow nor a network: all weights are
random. Without a GPU it says so, and its exit code is 3, so that nobody takes that for a pass.
--rehearse runs all of it on a CPU in tiny shapes, to see that the script itself is sound: exit
code 3 too. 1: something is wrong. 0: all was checked.
"""

import argparse
import copy
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from gpu_bench import bench_shapes  # noqa: E402 - found by the path above.
from tiny_models import random_model, successor_model  # noqa: E402
from varlen import plain_varlen, replay_by_running  # noqa: E402

from jobs.model import ModelFacts  # noqa: E402
from jobs.sampling import RowSampling, SamplingDefaults  # noqa: E402
from workers.generate import GenerateIterator, generate  # noqa: E402
from workers.model.flash import Flash, find_flash  # noqa: E402
from workers.model.graphs import CudaRecorder, Record  # noqa: E402
from workers.model.opening import open_slotted, prove_slotted  # noqa: E402
from workers.model.slots import SlotCache  # noqa: E402
from workers.model.slotted import SlottedForward, SlottedModel  # noqa: E402
from workers.pipeline import PipelineLimits, RowContext  # noqa: E402
from workers.turns import Turns  # noqa: E402

SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 512,
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "Llama": LlamaConfig(**SIZES),
    "Llama without groups": LlamaConfig(**SIZES | {"num_key_value_heads": 8}),
    "Mistral, window of 5": MistralConfig(**SIZES, sliding_window=5),
}
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 0.02}
"""How far logits may be off, as a share of their spread, the median over all places.

In bfloat16 this is added to twice what the architecture's own pass in bfloat16 is off: a wrong mask
or position is off by about 1.
"""
NUM_FED = 4
"Last tokens of each row that are fed one at a time."

faults: list[str] = []


def say(is_right: bool, words: str) -> None:
    """One line of the report."""
    print(f"{'ok   ' if is_right else 'WRONG'} {words}", flush=True)
    if not is_right:
        faults.append(words)


def random_rows(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 500, (k,), generator=generator).tolist() for k in lengths]


def alone(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """[L, V] of each row by itself, by the architecture's own pass, float32 on the CPU."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return [
            model(input_ids=torch.tensor([row], device=model.device), use_cache=False)
            .logits[0].float().cpu()
            for row in rows
        ]  # fmt: skip


def run_rows(
    slotted: SlottedModel, rows: list[list[int]], max_live: int
) -> dict[tuple[int, int], tuple[torch.Tensor, int]]:
    """Logits and best id by row and place, rows taking turns if not all are live."""
    contexts = [RowContext(tuple(row[:-NUM_FED]), RowSampling(NUM_FED + 1), 0) for row in rows]
    waiting, fed, seen = list(range(len(rows))), [0] * len(rows), {}
    live: set[int] = set()
    with torch.inference_mode():
        forward = SlottedForward(
            slotted, contexts, turns=None if max_live >= len(rows) else Turns(max_live, 9999)
        )
        while live or waiting:
            arriving = [waiting.pop(0) for _ in range(min(len(waiting), max_live - len(live)))]
            if arriving:
                forward.admit(arriving)
                live |= set(arriving)
            ran, logits = forward.next_logits()
            best = forward.best_ids()
            assert best is not None
            for row, z, best_id in zip(
                ran.tolist(), logits.float().cpu(), best.tolist(), strict=True
            ):
                seen[row, len(rows[row]) - 1 - NUM_FED + fed[row]] = z, best_id
                fed[row] += 1
            # Some end early, so that steps of several sizes are run.
            done = [row for row in ran.tolist() if fed[row] > (NUM_FED if row % 3 else 1)]
            for row in done:
                forward.release(row)
                live.discard(row)
            going = np.array(sorted(live), np.int64)
            places = [len(rows[row]) - NUM_FED - 1 + fed[row] for row in going]
            following = [rows[row][place] for row, place in zip(going, places, strict=True)]
            forward.append(going, np.array(following, np.int64))
    return seen


def off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The median over places [places, V] of how far logits are apart, by their spread."""
    spread = (theirs - theirs.mean(dim=1, keepdim=True)).norm(dim=1)
    return float(((ours - theirs).norm(dim=1) / spread).nan_to_num(nan=torch.inf).median())


def check_model(
    name: str, dtype: torch.dtype, device: torch.device, flash: Flash | None, record: Record | None
) -> None:
    """Prompts of unlike length, turns, what prompts share, step by step and by graphs."""
    exact = random_model(CONFIGS[name], scale=0.1).to(dtype).float()
    model = copy.deepcopy(exact).to(device, dtype)
    shared, *tails = random_rows(33, 9, 40, 7, 24, 61)
    batches = {
        "side by side": (random_rows(23, 9, 200, 5, 24, 6), 6),
        "in turns": (random_rows(23, 9, 50, 6, 24, 70, 8), 3),
        "with a common beginning": ([shared + tail for tail in tails], 5),
    }
    expected = {case: alone(exact, rows) for case, (rows, _) in batches.items()}
    own = {case: alone(model, rows) for case, (rows, _) in batches.items()}
    found_flash, shapes = prove_slotted(model, flash)
    wants_flash = flash is not None and dtype != torch.float32
    if wants_flash:
        say(found_flash is not None, f"{name}, {dtype}: flash attention is proved")
    cache = SlotCache(2000, 8, device)
    slotted = SlottedModel(model, cache, found_flash, shapes, max_length=512, max_rows=8)
    stepwise = {case: run_rows(slotted, *batch) for case, batch in batches.items()}
    runs = {"step by step": stepwise}
    if wants_flash and record is not None:
        with torch.inference_mode():
            say(slotted._graphs.capture(record), f"{name}, {dtype}: decode steps are captured")
        runs["by graphs"] = {case: run_rows(slotted, *batch) for case, batch in batches.items()}
    for way, by_case in runs.items():
        for case, seen in by_case.items():
            ours = torch.stack([z for z, _ in seen.values()])
            theirs = torch.stack([expected[case][row][place] for row, place in seen])
            plain = torch.stack([own[case][row][place] for row, place in seen])
            limit = TOLERANCES[dtype] + 2 * off(plain, theirs) * (dtype != torch.float32)
            two = theirs.topk(2, dim=1).values
            spread = theirs.std(dim=1)
            is_clear = (two[:, 0] - two[:, 1]) > 8 * limit * spread
            best = torch.tensor([best_id for _, best_id in seen.values()])
            is_same = (best == theirs.argmax(dim=1))[is_clear]
            apart = off(ours, theirs)
            say(
                apart <= limit and bool(is_same.all()),
                f"{name}, {dtype}, {case}, {way}: off by {apart:.1e} (limit {limit:.1e}), "
                f"{int(is_same.sum())} of {len(is_same)} clear best ids are the same",
            )
    if "by graphs" in runs:
        pairs = [
            (stepwise[case][at][0], z)
            for case in batches
            for at, (z, _) in runs["by graphs"][case].items()
        ]
        apart = off(torch.stack([b for _, b in pairs]), torch.stack([a for a, _ in pairs]))
        say(
            apart <= TOLERANCES[dtype],
            f"{name}, {dtype}: graphs are off single steps by {apart:.1e}",
        )


def check_pipeline(device: torch.device) -> None:
    """generate() and turns, on a model that counts, in bfloat16."""
    size = 32
    model = successor_model(size).to(device, torch.bfloat16)
    facts = ModelFacts("Llama", size, 64, (), SamplingDefaults(), False, "bfloat16")
    pipeline = open_slotted(model, facts, PipelineLimits(6, 64, 384))
    pipeline.warmup_graph_capture()
    if device.type == "cuda":
        say(pipeline.graph_capture_ready, "pipeline: graphs are ready")
    rows = [[start % size] for start in range(0, 60, 3)]
    wanted = [[(row[0] + k) % size for k in range(8)] for row in rows]
    counted = generate(pipeline, rows[:6], max_new_tokens=7, temperature=0).sequences
    say(counted == wanted[:6], "pipeline: greedy rows count")
    kept = generate(pipeline, rows[:6], max_new_tokens=7, temperature=0, output_logprobs=3)
    say(kept.sequences == wanted[:6], "pipeline: rows with log-probabilities count")
    drawn = [
        generate(pipeline, rows[:6], max_new_tokens=7, temperature=2.0, seed=5).sequences
        for _ in range(2)
    ]
    say(drawn[0] == drawn[1], "pipeline: the same seed draws the same tokens")
    contexts = [RowContext(tuple(row), RowSampling(7, temperature=0.0), 0) for row in rows]
    with GenerateIterator.from_contexts(pipeline, contexts, turns=Turns(6, 400)) as batch:
        while not batch.done:
            batch.advance()
        say(batch.sequences == wanted, f"pipeline: {len(rows)} rows in 6 places count")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, in tiny shapes")
    parser.add_argument("--seconds", type=float, default=330, help="begin nothing new after these")
    asked = parser.parse_args()
    if not asked.rehearse and not torch.cuda.is_available():
        print("no GPU here: nothing was checked")
        return 3
    logging.basicConfig(level=logging.WARNING, format="      (%(message)s)", stream=sys.stdout)
    if asked.rehearse:
        torch.set_num_threads(1)
    ends_at = time.perf_counter() + asked.seconds
    device = torch.device("cpu" if asked.rehearse else "cuda", None if asked.rehearse else 0)
    flash = Flash(plain_varlen) if asked.rehearse else find_flash(device)
    where = "a rehearsal" if asked.rehearse else torch.cuda.get_device_name(device)
    print(f"torch {torch.__version__}, {where}")
    say(flash is not None, "torch.nn.attention.varlen takes the arguments that are needed")
    for name in CONFIGS:
        for dtype in TOLERANCES:
            record = replay_by_running if asked.rehearse else CudaRecorder(device)
            check_model(name, dtype, device, flash, record)
    check_pipeline(device)
    bench_shapes(device, ends_at, say)
    print(f"{len(faults)} of the checks are wrong" if faults else "all checks are right")
    if asked.rehearse:
        print("this was a rehearsal on a CPU: nothing was checked on a GPU, and no figure counts")
        return 1 if faults else 3
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
