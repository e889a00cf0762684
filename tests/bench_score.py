"""Scored tokens a second: against transformers, lm-evaluation-harness, and the multiply limit.

    python tests/bench_score.py [--rows 96] [--questions 24] [--rounds 2]

The demo model in float32. Ours are workers of one thread each, one a core; the others have all
cores in one process. transformers runs rows sorted by length in padded batches of 8 and makes all
their logits; lm-evaluation-harness is its own HFLM in batches of 8, and is left out if it is not
installed. All take turns in one run. Machines are shared and their speed drifts: only ratios within
a run mean something.

The last line is one JSON object:
    share_of_limit         time that the multiplies of this work take by themselves, by ours
    ratio_forward          transformers' time for texts, by ours
    ratio_lm_eval          HFLM's time for texts, loglikelihood_rolling, by ours
    ratio_choices          time of the faster of both for four choices a context, by ours
    peak_over_weights_mb   of a worker of its own, beyond the weights, the greatest of these lengths
    peaks_mb               the same by the length of its row
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from team import MemoryWatch, Team
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from workload import prompts

from jobs.model import ModelRef
from jobs.scoring import ScoreRequest
from workers.model.folder import find_model
from workers.model.loading import load_tokenizer

_BOS = 1
_BATCH = 8
_PASS, _HEAD = 2048, 2**25 // (4 * 49_152)
"Tokens that run through the layers together, and through the head."
_LENGTHS = (512, 2048, 8192)
_CONTEXT, _CHOICES = 200, 4

Sums = list[float]
Run = Callable[[Sequence[ScoreRequest]], tuple[float, Sums]]


def forward(model: PreTrainedModel) -> Run:
    """Padded batches in order of length, with the logits of all places."""

    def run_batch(batch: Sequence[ScoreRequest]) -> Sums:
        longest = max(len(request.token_ids) for request in batch)
        rows = [[*r.token_ids, *[2] * (longest - len(r.token_ids))] for r in batch]
        ids = torch.tensor(rows)
        mask = torch.tensor([[k < len(r.token_ids) for k in range(longest)] for r in batch]).long()
        with torch.inference_mode():
            logprobs = model(ids, attention_mask=mask).logits.log_softmax(-1)
        found = logprobs[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
        return [
            float(row[r.num_context - 1 : len(r.token_ids) - 1].sum())
            for row, r in zip(found, batch, strict=True)
        ]

    def run(requests: Sequence[ScoreRequest]) -> tuple[float, Sums]:
        order = sorted(range(len(requests)), key=lambda row: -len(requests[row].token_ids))
        started, sums = time.perf_counter(), dict[int, float]()
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            sums |= zip(batch, run_batch([requests[row] for row in batch]), strict=True)
        return time.perf_counter() - started, [sums[row] for row in range(len(requests))]

    return run


def harness(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[Run, Run]:
    """HFLM's own loglikelihood_rolling and loglikelihood, fed with token ids."""
    from lm_eval.models.huggingface import HFLM

    hflm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=_BATCH, device="cpu")

    def rolling(requests: Sequence[ScoreRequest]) -> tuple[float, Sums]:
        by_text = {tokenizer.decode(r.token_ids[1:]): r.token_ids[1:] for r in requests}
        hflm.tok_encode = lambda text, **_: list(by_text[text])  # The very tokens that are ours.
        started = time.perf_counter()
        sums = hflm.loglikelihood_rolling([_Instance((text,)) for text in by_text], True)
        return time.perf_counter() - started, list(sums)

    def pairs(requests: Sequence[ScoreRequest]) -> tuple[float, Sums]:
        given = [
            (("", ""), list(r.token_ids[: r.num_context]), list(r.token_ids[r.num_context :]))
            for r in requests
        ]
        started = time.perf_counter()
        found = hflm._loglikelihood_tokens(given, disable_tqdm=True)
        return time.perf_counter() - started, [value for value, _ in found]

    return rolling, pairs


class _Instance:
    """A request as the harness has it."""

    def __init__(self, arguments: tuple[str, ...]) -> None:
        self.args = arguments


def texts_of(rows: Sequence[list[int]]) -> list[ScoreRequest]:
    """Rows from their first token on, behind BOS."""
    return [ScoreRequest((_BOS, *row), 1) for row in rows]


def exam(rows: Sequence[list[int]], questions: int) -> list[ScoreRequest]:
    """Contexts of about 200 tokens, with four choices of 1 to 8 tokens each."""
    generator = random.Random(1)
    ids = [token for row in rows for token in row]
    requests = []
    for _ in range(questions):
        length = generator.randrange(_CONTEXT - 50, _CONTEXT + 51)
        start = generator.randrange(len(ids) - length)
        context = ids[start : start + length]
        for _ in range(_CHOICES):
            first = generator.randrange(len(ids) - 8)
            choice = ids[first : first + generator.randrange(1, 9)]
            requests.append(ScoreRequest((*context, *choice), length))
    return requests


def limit_seconds(team: Team, requests: Sequence[ScoreRequest], num_workers: int) -> float:
    """What the multiplies take, at the sizes at which they are made, on all cores."""
    [(layers, _), (_, head)] = team.multiply_seconds([(_PASS, 1), (_HEAD, _HEAD)])
    run = sum(len(request.token_ids) - 1 for request in requests) / num_workers
    scored = sum(request.num_scored for request in requests) / num_workers
    return run / _PASS * layers + scored / _HEAD * head


def peaks_over_weights(ids: list[int], weights_mb: float) -> dict[int, float]:
    """Memory of a worker that scores one row of each length, beyond the weights, in MB."""
    peaks = {}
    for length in _LENGTHS:
        lone = Team(1, max_length=max(_LENGTHS))
        watch = MemoryWatch(lone.pids)
        lone.score([ScoreRequest((_BOS, *ids[:length]), 1)])
        peaks[length] = round(watch.close() - weights_mb)
        lone.close()
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()

    tokenizer = load_tokenizer(find_model(ModelRef("demo")))
    rows = prompts(tokenizer, max(asked.rows, 96))
    texts, choices = texts_of(rows[: asked.rows]), exam(rows, asked.questions)
    model = AutoModelForCausalLM.from_pretrained(find_model(ModelRef("demo"))).eval()
    weights_mb = sum(weight.nbytes for weight in model.parameters()) / 1e6
    num_workers = max(2, (os.cpu_count() or 2))
    peaks = peaks_over_weights([i for row in rows for i in row], weights_mb)
    team = Team(num_workers, max_length=1024)
    runs: dict[str, tuple[Run, Sequence[ScoreRequest]]] = {
        "batchwright": (team.score, texts),
        "transformers": (forward(model), texts),
        "batchwright, choices": (team.score, choices),
        "transformers, choices": (forward(model), choices),
    }
    if find_spec("lm_eval"):
        rolling, pairs = harness(model, tokenizer)
        runs |= {"lm-eval": (rolling, texts), "lm-eval, choices": (pairs, choices)}
    print(f"{len(texts)} texts, {sum(r.num_scored for r in texts):,} tokens; {asked.questions} "
          f"contexts with {_CHOICES} choices; {num_workers} workers")  # fmt: skip
    for run, requests in runs.values():
        run(requests[:2])  # The first pass maps weights and fills caches.
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    limits, sums = [], dict[str, Sums]()
    for number in range(asked.rounds):
        for name, (run, requests) in runs.items():
            spent, sums[name] = run(requests)
            seconds[name].append(spent)
            speed = sum(len(request.token_ids) for request in requests) / spent
            print(f"round {number}: {name:24} {spent:7.1f} s  {speed:7.1f} tokens/s", flush=True)
        limits.append(limit_seconds(team, texts, num_workers))
        print(f"round {number}: {'multiplies alone':24} {limits[-1]:7.1f} s", flush=True)
    for name in runs:
        ours = sums["batchwright, choices" if name.endswith("choices") else "batchwright"]
        away = max(abs(a - b) for a, b in zip(ours, sums[name], strict=True))
        print(f"greatest difference of a sum, {name}: {away:.2g} nats")
    team.close()
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    others = [t for name, t in middle.items() if name.endswith("choices") and name[0] != "b"]
    found: dict[str, object] = {
        "share_of_limit": statistics.median(limits) / middle["batchwright"],
        "ratio_forward": middle["transformers"] / middle["batchwright"],
        "ratio_lm_eval": middle.get("lm-eval", float("nan")) / middle["batchwright"],
        "ratio_choices": min(others) / middle["batchwright, choices"],
    }
    found = {name: round(float(str(value)), 2) for name, value in found.items()}
    found |= {"peak_over_weights_mb": max(peaks.values()), "peaks_mb": peaks}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
