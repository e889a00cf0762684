"""batchwright answers the prompts of a work file.

python run_ours.py WORK
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from jobs.job import Packing
from workers.generate import generate, open_pipeline

Rows = list[list[int]]


def ours(work: dict[str, Any]) -> tuple[float, Rows]:
    """Seconds from the first prompt to the last answer, and the answers in the prompts' order."""
    torch.set_num_threads(work["num_threads"])
    batch = Packing().rows_per_batch
    longest = max(map(len, work["prompts"]))
    pipeline = open_pipeline("demo", max_batch_size=batch, max_length=longest + work["new_tokens"])

    def answer(rows: Rows) -> Rows:
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]), reverse=True)
        answers: Rows = [[] for _ in rows]
        for start in range(0, len(rows), batch):
            chosen = order[start : start + batch]
            result = generate(
                pipeline,
                [rows[i] for i in chosen],
                max_new_tokens=work["new_tokens"],
                temperature=0,
                ignore_eos=True,
                output_logprobs=work["logprobs"],
            )
            for i, sequence in zip(chosen, result.sequences, strict=True):
                answers[i] = sequence[len(rows[i]) :]
        return answers

    answer(work["warm_up"])
    started = time.perf_counter()
    answers = answer(work["prompts"])
    return time.perf_counter() - started, answers


if __name__ == "__main__":
    seconds, answers = ours(json.loads(Path(sys.argv[1]).read_text("utf-8")))
    print(json.dumps({"seconds": seconds, "answers": answers}))
