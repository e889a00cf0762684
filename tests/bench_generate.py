"""Generated tokens a second, against transformers' own generate(), alternating in one run.

    python tests/bench_generate.py [--rows 64] [--new-tokens 64] [--rounds 2]

Both run the demo model in float32 in this process, on all cores, greedy, with the end of text
ignored so that the work is fixed, over the same prompts sorted by length: theirs in batches of 32,
ours in batches of a job's default size, and of 32 too. Machines are shared and their speed drifts:
only ratios within a run mean something.
The last line is one JSON object: tokens_per_s, ratio_transformers, and ratio_same_batch.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM
from workload import prompts

from jobs.job import Packing
from jobs.model import ModelRef
from workers.generate import generate, open_pipeline
from workers.model.folder import find_model
from workers.model.loading import load_tokenizer

Rows = list[list[int]]
BATCH = {"batchwright": Packing().rows_per_batch, "batchwright, 32": 32, "transformers": 32}


def ours(new_tokens: int) -> Callable[[Rows], Rows]:
    pipeline = open_pipeline(
        "demo", max_batch_size=BATCH["batchwright"], max_length=512 + new_tokens
    )

    def run(batch: Rows) -> Rows:
        result = generate(
            pipeline, batch, max_new_tokens=new_tokens, temperature=0, ignore_eos=True
        )
        return [s[len(row) :] for s, row in zip(result.sequences, batch, strict=True)]

    return run


def theirs(new_tokens: int) -> Callable[[Rows], Rows]:
    model = AutoModelForCausalLM.from_pretrained(find_model(ModelRef("demo"))).eval()
    model.generation_config.eos_token_id = None

    def run(batch: Rows) -> Rows:
        longest = max(map(len, batch))
        ids = torch.tensor([[2] * (longest - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in batch])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=2
            )
        return out[:, longest:].tolist()

    return run


def measure(run: Callable[[Rows], Rows], rows: Rows, batch: int) -> tuple[float, Rows]:
    """Seconds for all rows, and what they yield."""
    started = time.perf_counter()
    answers: Rows = []
    for start in range(0, len(rows), batch):
        answers += run(rows[start : start + batch])
    return time.perf_counter() - started, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()

    rows = prompts(load_tokenizer(find_model(ModelRef("demo"))), asked.rows)
    rows.sort(key=len, reverse=True)
    run_ours, run_theirs = ours(asked.new_tokens), theirs(asked.new_tokens)
    runs = {name: run_theirs if name == "transformers" else run_ours for name in BATCH}

    cores = torch.get_num_threads()
    print(f"{len(rows)} prompts, {sum(map(len, rows)):,} tokens, {cores} threads")
    for run in (run_ours, run_theirs):  # The first pass maps weights and fills caches.
        run([row[:16] for row in rows[-2:]])
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    answers: dict[str, Rows] = {}
    for number in range(asked.rounds):
        for name, run in runs.items():
            spent, answers[name] = measure(run, rows, BATCH[name])
            seconds[name].append(spent)
            speed = len(rows) * asked.new_tokens / spent
            print(f"round {number}: {name:15} {spent:6.1f} s  {speed:6.1f} tokens/s", flush=True)
    same = sum(a == b == c for a, b, c in zip(*answers.values(), strict=True))
    print(f"{same} of {len(rows)} answers are the same tokens")
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    print(
        json.dumps(
            {
                "tokens_per_s": round(len(rows) * asked.new_tokens / middle["batchwright"], 1),
                "ratio_transformers": round(middle["transformers"] / middle["batchwright"], 2),
                "ratio_same_batch": round(middle["transformers"] / middle["batchwright, 32"], 2),
            }
        )
    )


if __name__ == "__main__":
    main()
