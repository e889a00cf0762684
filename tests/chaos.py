"""Jobs that are killed at random moments and resumed, until each has ended: what is lost?

    python tests/chaos.py --rounds 100 --demo-rounds 5

Each round runs one job to its end. Meanwhile workers are killed, or the driver is killed or told to
stop and started again with --resume. Then `verify` must pass, and every part must be the same bytes
as in a run that nobody disturbed, with another number of workers. Prints a line a round and, last,
one JSON object.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from running import BATCHWRIGHT, batchwright, read_rows, worker_pids, write_prompts

KINDS = ("worker", "driver", "sigterm")
_STOPPED = (143, -signal.SIGTERM)
"A driver that is told to stop before it listens ends by the signal itself."
_MOST_RUNS = 20


@dataclass(frozen=True, slots=True)
class Work:
    """A job to be disturbed."""

    folder: Path
    flags: tuple[str, ...]
    num_rows: int
    seconds: float
    "How long it takes undisturbed, and so when a kill may come."
    parts: dict[str, str]
    "SHA-256 of each part of the undisturbed run."


@dataclass(slots=True)
class Outcome:
    """What became of a round, or of all."""

    rounds: int = 0
    kills: int = 0
    rows_lost: int = 0
    rows_twice: int = 0
    parts_differing: int = 0
    not_verified: int = 0


def prepare(folder: Path, *, model: str, num_shards: int) -> Work:
    """Runs the job once with one worker and nobody in its way."""
    if model == "demo":
        prompts = [f"Chapter {i}. The weather was" for i in range(2 * num_shards)]
        flags = ["--model", "demo", "--max-new-tokens", "6", "--rows-per-shard", "2"]
    else:
        prompts = [f"{'x' * (i % 37)} {i}" for i in range(4 * num_shards)]
        flags = ["--model", "e", "--engine", "echo", "--max-new-tokens", "60", "--ignore-eos"]
        flags += ["--rows-per-shard", "4", "--rows-per-batch", "2", "--output-logits"]
    flags += ["--seed", "5", "--logprobs", "2"]
    write_prompts(folder / "in.parquet", prompts)
    started = time.monotonic()
    result = batchwright(
        "run", folder / "in.parquet", folder / "calm", *flags, "--num-workers", "1"
    )
    assert result.returncode == 0, result.stderr
    seconds = time.monotonic() - started
    return Work(folder, tuple(flags), len(prompts), seconds, hashes(folder / "calm"))


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of each part."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("part-*"))
    }


def play_round(work: Work, number: int, seed: int) -> tuple[str, Outcome]:
    """Runs the job to its end against all odds. Returns a line for the table, and what became."""
    dice = random.Random(f"{seed} {number}")
    kind = KINDS[number % len(KINDS)]
    output = work.folder / f"round-{number}"
    started, kills, seen = time.monotonic(), 0, []
    disturbances = dice.randint(1, 2)
    for _ in range(_MOST_RUNS):
        driver = start(work, output)
        if disturbances:
            seen.append(wait_for_moment(dice, work, output, driver))
            disturbances -= 1
            kills += disturb(kind, driver, dice)
        _, said = driver.communicate(timeout=300)
        code = driver.returncode
        if code == 0:
            break
        expected = {"worker": (), "driver": (-signal.SIGKILL,), "sigterm": _STOPPED}[kind]
        assert code in expected, f"round {number}, {kind}: exit code {code}\n{said}"
    outcome = judge(work, output, kills)
    line = (
        f"{number:5}  {kind:8} {kills:5}  {time.monotonic() - started:7.1f}  "
        f"{'/'.join(map(str, seen)):>9}  {outcome.rows_lost:4}  {outcome.rows_twice:5}  "
        f"{outcome.parts_differing:9}  {'no' if outcome.not_verified else 'yes'}"
    )
    shutil.rmtree(output)
    return line, outcome


def start(work: Work, output: Path) -> "subprocess.Popen[str]":
    """Starts a driver, or starts it again."""
    command = [BATCHWRIGHT, "run", work.folder / "in.parquet", output, *work.flags]
    return subprocess.Popen(
        [*map(str, command), "--num-workers", "2", "--resume", "--quiet"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_moment(
    dice: random.Random, work: Work, output: Path, driver: "subprocess.Popen[str]"
) -> int:
    """Waits for some time: at all, or from the first new part. Returns how many parts there are."""
    before = count_parts(output)
    if dice.random() < 0.3:
        deadline = time.monotonic() + dice.uniform(0, work.seconds)
    else:
        while count_parts(output) == before and driver.poll() is None:
            time.sleep(0.02)
        deadline = time.monotonic() + dice.uniform(0, work.seconds / 4)
    while time.monotonic() < deadline and driver.poll() is None:
        time.sleep(0.01)
    return count_parts(output)


def count_parts(output: Path) -> int:
    """Parts that have their name."""
    return len(list(output.glob("part-*"))) if output.exists() else 0


def disturb(kind: str, driver: "subprocess.Popen[str]", dice: random.Random) -> int:
    """Kills or stops what the round is about. Returns how many processes that were."""
    if driver.poll() is not None:
        return 0
    if kind == "worker":
        pids = worker_pids(driver.pid)
        if not pids:
            return 0
        try:
            os.kill(dice.choice(pids), signal.SIGKILL)
        except ProcessLookupError:
            return 0
        return 1
    os.kill(driver.pid, signal.SIGKILL if kind == "driver" else signal.SIGTERM)
    return 1


def judge(work: Work, output: Path, kills: int) -> Outcome:
    """Looks at what the round has left."""
    verdict = batchwright("verify", output, "--json")
    rows = Counter(read_rows(output)["row_id"].to_pylist())
    found = hashes(output)
    differing = [name for name in work.parts | found if work.parts.get(name) != found.get(name)]
    if verdict.returncode:
        sys.stderr.write(verdict.stdout + verdict.stderr)
    return Outcome(
        rounds=1,
        kills=kills,
        rows_lost=len(set(range(work.num_rows)) - set(rows)),
        rows_twice=sum(count - 1 for count in rows.values()),
        parts_differing=len(differing),
        not_verified=int(verdict.returncode != 0),
    )


def play(folder: Path, *, model: str, rounds: int, num_shards: int, seed: int) -> Outcome:
    """Plays rounds, two at a time, and prints a line for each."""
    work = prepare(folder, model=model, num_shards=num_shards)
    print(f"{model}: {len(work.parts)} shards, {work.seconds:.1f} s undisturbed, seed {seed}")
    print("round  kind     kills  seconds   parts at  lost  twice  differing  verified")
    total = Outcome()
    with ThreadPoolExecutor(max_workers=2) as players:
        for line, outcome in players.map(lambda n: play_round(work, n, seed), range(rounds)):
            print(line, flush=True)
            for name, value in asdict(outcome).items():
                setattr(total, name, getattr(total, name) + value)
    return total


def main() -> None:
    """Plays what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--demo-rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    asked = parser.parse_args()
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for model, rounds, num_shards in (
            ("echo", asked.rounds, 60), ("demo", asked.demo_rounds, 12),
        ):  # fmt: skip
            if rounds:
                place = Path(folder) / model
                outcome = play(
                    place, model=model, rounds=rounds, num_shards=num_shards, seed=asked.seed
                )
                total.update(asdict(outcome))
    print(json.dumps({name: total[name] for name in asdict(Outcome())}))
    names = ("rows_lost", "rows_twice", "parts_differing", "not_verified")
    sys.exit(any(total[name] for name in names))


if __name__ == "__main__":
    main()
