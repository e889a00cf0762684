"""Generated tokens a second and memory, against OpenVINO GenAI, vLLM and CTranslate2 on the CPU.

    python tests/bench_peers.py [--rows 256] [--new-tokens 64] [--rounds 2] [--only openvino,vllm]

All run the demo model in float32 on all cores, greedy, with the end of text ignored so that the
work is fixed, over the same prompts, given as token ids. Each runs in a process of its own, peers
with the Python of their own environment (`make bench-peers` builds them in build/peers), one after
another in every round. Loading and a short warm-up are not timed. Machines are shared and their
speed drifts: only ratios within a run mean something.
The last line is one JSON object: ratio_X is how many times as fast as X ours is, peak_gb_X the most
memory of its processes at once, loading included, same_X how many answers are the same tokens as
ours: a peer that is fast and wrong shows there. What could not be measured is said, and null.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from workload import prompts

from jobs.model import ModelRef
from workers.model.folder import find_model
from workers.model.loading import load_tokenizer

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "tests" / "peers"
BUILT = ROOT / "build" / "peers"
CORES = len(os.sched_getaffinity(0))
OURS = "batchwright"
LOGPROBS = 5
CONVERTERS = {
    "openvino": "optimum-cli export openvino --task text-generation-with-past --weight-format fp32"
    " --model MODEL TARGET",
    "ctranslate2": "ct2-transformers-converter --quantization float32"
    " --model MODEL --output_dir TARGET",
    "vllm": f"python {SCRIPTS}/name_embeddings.py MODEL TARGET",
}
"What brings the model into the peer's form, where it does not read the model's own."


class PeerError(Exception):
    """A competitor cannot be measured."""


@dataclass(frozen=True, slots=True)
class Competitor:
    """One line of the table."""

    name: str
    peer: str
    "Whose script and environment."
    logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """One run."""

    seconds: float
    answers: list[list[int]]
    peak_bytes: int


COMPETITORS = (
    Competitor(OURS, OURS),
    Competitor("openvino", "openvino"),
    Competitor("vllm", "vllm"),
    Competitor("ctranslate2", "ctranslate2"),
    Competitor(f"{OURS}_logprobs", OURS, LOGPROBS),
    Competitor("vllm_logprobs", "vllm", LOGPROBS),
)


def python_of(peer: str) -> Path:
    if peer == OURS:
        return Path(sys.executable)
    folder = BUILT / peer
    if not (folder / "ready").exists():
        raise PeerError(f"build/peers/{peer} could not be built; its file log says why")
    return folder / "venv" / "bin" / "python"


def model_of(peer: str, model: Path) -> Path:
    """The model's folder in the peer's form, which is converted once."""
    if peer not in CONVERTERS:
        return model
    target = BUILT / peer / f"model-{model.name[:12]}"
    if not target.exists():
        draft = target.with_suffix(".draft")
        shutil.rmtree(draft, ignore_errors=True)
        places = {"MODEL": str(model), "TARGET": str(draft)}
        command, *rest = [places.get(word, word) for word in CONVERTERS[peer].split()]
        run_quietly([python_of(peer).with_name(command), *rest])
        draft.rename(target)
    return target


def run_quietly(command: list[str | Path]) -> tuple[str, int]:
    """What it prints, and the most bytes that its processes held at once.

    Raises PeerError if it fails.
    """
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(CORES),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}" if command[0] == Path(sys.executable) else "",
    }
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            list(map(str, command)),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        peaks: list[int] = []
        watcher = threading.Thread(target=watch, args=(process.pid, peaks))
        watcher.start()
        printed, _ = process.communicate()
        watcher.join()
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    if process.returncode != 0:
        last = lines[-1].strip() if lines else "no word"
        raise PeerError(f"{Path(command[0]).name} ended with {process.returncode}: {last}")
    return printed, max(peaks, default=0)


def watch(pid: int, peaks: list[int]) -> None:
    """Adds the memory of a process and its children to the peaks each time it has grown.

    Resident sizes count shared pages twice but are cheap to read; proportional ones cost a walk
    through all pages, and are read only when the others have grown by 2 %.
    """
    highest = 0.0
    while True:
        try:
            top = psutil.Process(pid)
            if top.status() == psutil.STATUS_ZOMBIE:
                return
            family = [top, *top.children(recursive=True)]
            resident = sum(process.memory_info().rss for process in family)
            if resident > 1.02 * highest:
                highest = resident
                peaks.append(sum(process.memory_full_info().pss for process in family))
        except psutil.NoSuchProcess:
            if not psutil.pid_exists(pid):
                return
        time.sleep(0.2)


def measure(competitor: Competitor, work: dict[str, object], model: Path) -> Measured:
    """One run. Raises PeerError if it cannot be had."""
    name = "ours" if competitor.peer == OURS else competitor.peer
    python, folder = python_of(competitor.peer), model_of(competitor.peer, model)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "work.json"
        path.write_text(json.dumps(work | {"logprobs": competitor.logprobs}), "utf-8")
        printed, peak = run_quietly([python, SCRIPTS / f"run_{name}.py", path, folder])
    lines = [line for line in printed.splitlines() if line.startswith('{"seconds"')]
    if not lines:
        raise PeerError("it printed no answers")
    told = json.loads(lines[-1])
    return Measured(told["seconds"], told["answers"], peak)


def run_rounds(
    chosen: list[Competitor], work: dict[str, object], *, rounds: int, num_tokens: int
) -> dict[str, list[Measured]]:
    """All runs of those that never failed."""
    model = find_model(ModelRef("demo"))
    runs: dict[str, list[Measured]] = {competitor.name: [] for competitor in chosen}
    for number in range(rounds):
        for competitor in [one for one in chosen if one.name in runs]:
            try:
                run = measure(competitor, work, model)
            except PeerError as error:
                if competitor.peer == OURS:
                    raise
                print(f"{competitor.name}: not measured: {error}", flush=True)
                del runs[competitor.name]
                continue
            runs[competitor.name].append(run)
            print(
                f"round {number}: {competitor.name:20} {run.seconds:7.1f} s "
                f"{num_tokens / run.seconds:7.1f} tokens/s  {run.peak_bytes / 1e9:5.2f} GB  "
                f"{num_same(competitor, runs)} of {len(run.answers)} answers as ours",
                flush=True,
            )
    return runs


def num_same(competitor: Competitor, runs: dict[str, list[Measured]]) -> int:
    """How many answers of its last run are the same tokens as ours."""
    ours = runs[competitor.name.replace(competitor.peer, OURS)][-1].answers
    return sum(a == b for a, b in zip(ours, runs[competitor.name][-1].answers, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="openvino,vllm,ctranslate2", help="peers, with commas")
    asked = parser.parse_args()
    peers = {OURS, *asked.only.split(",")}

    rows = prompts(load_tokenizer(find_model(ModelRef("demo"))), asked.rows)
    work: dict[str, object] = {
        "prompts": rows,
        "new_tokens": asked.new_tokens,
        "num_threads": CORES,
        "warm_up": [row[:16] for row in rows[:2]],
    }
    print(f"{len(rows)} prompts, {sum(map(len, rows)):,} tokens, {CORES} threads", flush=True)
    chosen = [one for one in COMPETITORS if one.peer in peers]
    num_tokens = len(rows) * asked.new_tokens
    runs = run_rounds(chosen, work, rounds=asked.rounds, num_tokens=num_tokens)
    report(runs, num_tokens)


def report(runs: dict[str, list[Measured]], num_tokens: int) -> None:
    middle = {name: statistics.median(run.seconds for run in of) for name, of in runs.items()}
    peaks = {name: max(run.peak_bytes for run in of) / 1e9 for name, of in runs.items()}
    print(f"{'':20} tokens/s  peak GB")
    for name in sorted(middle, key=middle.__getitem__):
        print(f"{name:20} {num_tokens / middle[name]:8.1f} {peaks[name]:8.2f}")
    values: dict[str, float | None] = {"tokens_per_s": round(num_tokens / middle[OURS], 1)}
    for one in COMPETITORS:
        if one.peer != OURS:
            ours = middle[one.name.replace(one.peer, OURS)]
            seconds = middle.get(one.name)
            values[f"ratio_{one.name}"] = seconds and round(seconds / ours, 2)
    for one in COMPETITORS:
        values[f"peak_gb_{one.name}"] = round(peaks[one.name], 2) if one.name in peaks else None
    for one in COMPETITORS:
        if one.peer != OURS:
            values[f"same_{one.name}"] = num_same(one, runs) if one.name in runs else None
    print(json.dumps(values))


if __name__ == "__main__":
    main()
