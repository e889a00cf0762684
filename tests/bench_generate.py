"""Generated tokens a second: against transformers' own generate(), and against the multiply limit.

    python tests/bench_generate.py [--rows 64] [--new-tokens 64] [--rounds 2]

The demo model in float32, greedy, with the end of text ignored so that the work is fixed. Ours are
workers of one thread each, one a core; theirs has all cores in one process, prompts sorted by
length, in batches of 32. All take turns in one run. Machines are shared and their speed drifts:
only ratios within a run mean something.

The last line is one JSON object:
    tokens_per_s         of ours
    ratio_transformers   their time by ours
    share_of_limit       time that the multiplies of this work take by themselves, by ours
    logprobs_cost        what five alternatives a token add to the time
    prefix_gain          time of rows with a common system prompt without sharing it, by ours with
    speedup_2            time of one worker by that of two
    refill_gain          time of answers that end by themselves in fixed batches, by ours in turns
    peak_memory_mb       of our workers together
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
from team import MemoryWatch, Rows, Team, Work
from transformers import AutoModelForCausalLM
from workload import prompts

from jobs.model import ModelRef
from workers.model.folder import find_model
from workers.model.loading import load_tokenizer

_SHARED = 400
"Tokens of the system prompt."
_PASS = 1024
"Tokens of prompts that run through the layers together."


def theirs(new_tokens: int) -> Callable[[Rows], tuple[float, Rows]]:
    """transformers' generate() over the rows, sorted, in batches of 32."""
    model = AutoModelForCausalLM.from_pretrained(find_model(ModelRef("demo"))).eval()
    model.generation_config.eos_token_id = None

    def run_batch(batch: Rows) -> Rows:
        longest = max(map(len, batch))
        ids = torch.tensor([[2] * (longest - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in batch])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=2
            )
        return out[:, longest:].tolist()

    def run(rows: Rows) -> tuple[float, Rows]:
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        started = time.perf_counter()
        answers: dict[int, list[int]] = {}
        for start in range(0, len(order), 32):
            batch = order[start : start + 32]
            answers |= zip(batch, run_batch([rows[row] for row in batch]), strict=True)
        return time.perf_counter() - started, [answers[row] for row in range(len(rows))]

    return run


def limit_seconds(team: Team, rows: Rows, work: Work, num_workers: int) -> float:
    """What the multiplies of the work take, at the sizes at which they are made, on all cores."""
    live = min(work.rows_per_batch, len(rows) // num_workers)
    [(pass_seconds, _), (step_seconds, head_seconds)] = team.multiply_seconds(
        [(_PASS, 1), (live, live)]
    )
    prompt_tokens = sum(map(len, rows)) / num_workers
    rounds = len(rows) / num_workers / live
    steps = rounds * (work.new_tokens - 1)
    return (
        prompt_tokens / _PASS * pass_seconds
        + steps * step_seconds
        + rounds * work.new_tokens * head_seconds
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rows-per-batch", type=int, default=Work(1).rows_per_batch)
    asked = parser.parse_args()

    rows = prompts(load_tokenizer(find_model(ModelRef("demo"))), asked.rows)
    few = rows[: max(8, len(rows) // 2)]
    system = [token for row in rows for token in row][:_SHARED]
    chats = [system + row[:60] for row in few]
    num_workers = max(2, (os.cpu_count() or 2))
    work = Work(asked.new_tokens, asked.rows_per_batch)
    team = Team(num_workers, max_length=512 + asked.new_tokens)
    lone = Team(1, max_length=512 + asked.new_tokens)
    run_theirs = theirs(asked.new_tokens)
    watch = MemoryWatch(team.pids)

    def ours(rows: Rows, **changes: object) -> tuple[float, Rows]:
        return team.run(rows, Work(**{**vars(work), **changes}))

    runs: dict[str, Callable[[], tuple[float, Rows]]] = {
        "batchwright": lambda: ours(rows),
        "transformers": lambda: run_theirs(rows),
        "with logprobs": lambda: ours(rows, logprobs=5),
        "few rows": lambda: ours(few),
        "few rows, one worker": lambda: lone.run(few, work),
        "system prompt": lambda: ours(chats),
        "system prompt, not shared": lambda: ours(chats, shares_prefix=False),
        "ends by itself": lambda: ours(rows, ignore_eos=False, rows_per_batch=16),
        "ends by itself, fixed": lambda: ours(
            rows, ignore_eos=False, rows_per_batch=16, is_fixed=True
        ),
    }
    print(f"{len(rows)} prompts, {sum(map(len, rows)):,} tokens, {num_workers} workers")
    for run in (
        lambda: ours(few[:2]),
        lambda: lone.run(few[:2], work),
        lambda: run_theirs(few[:2]),
    ):
        run()  # The first pass maps weights and fills caches.
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    limits, answers = [], {}
    for number in range(asked.rounds):
        for name, run in runs.items():
            spent, answers[name] = run()
            seconds[name].append(spent)
            speed = sum(map(len, answers[name])) / spent
            print(f"round {number}: {name:26} {spent:7.1f} s  {speed:7.1f} tokens/s", flush=True)
        watch.is_paused = True  # The limit has weights of its own.
        limits.append(limit_seconds(team, rows, work, num_workers))
        watch.is_paused = False
        print(f"round {number}: {'multiplies alone':26} {limits[-1]:7.1f} s", flush=True)
    pairs = zip(answers["batchwright"], answers["transformers"], strict=True)
    print(f"{sum(a == b for a, b in pairs)} of {len(rows)} answers are the same tokens")
    peak_mb = watch.close()
    team.close()
    lone.close()
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    spent = middle["batchwright"]
    print(
        json.dumps(
            {
                "tokens_per_s": round(len(rows) * asked.new_tokens / spent, 1),
                "ratio_transformers": round(middle["transformers"] / spent, 2),
                "share_of_limit": round(statistics.median(limits) / spent, 2),
                "logprobs_cost": round(middle["with logprobs"] / spent - 1, 3),
                "prefix_gain": round(
                    middle["system prompt, not shared"] / middle["system prompt"], 2
                ),
                "speedup_2": round(middle["few rows, one worker"] / middle["few rows"], 2),
                "refill_gain": round(middle["ends by itself, fixed"] / middle["ends by itself"], 2),
                "peak_memory_mb": round(peak_mb),
            }
        )
    )


if __name__ == "__main__":
    main()
