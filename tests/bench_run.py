"""What the runner costs without a model: rows a second and peak memory on the echo engine.

    python tests/bench_run.py [--rows 200000] [--new-tokens 32] [--num-workers 2]

The job is the whole one, logprobs and logits included, on a Ray of its own.
The last line is one JSON object: rows_per_s, tokens_per_s, driver_peak_mb and worker_peak_mb.
"""

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from running import BATCHWRIGHT, worker_pids


def peak_mb(pid: int) -> float:
    """Most memory that a process has held so far, in MB; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return max([int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM")] or [0.0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--num-workers", type=int, default=2)
    asked = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "prompts.parquet"), Path(folder, "out")
        texts = [f"Row {i} of the input, to be answered." for i in range(asked.rows)]
        pq.write_table(pa.table({"id": range(asked.rows), "prompt": texts}), source)
        command = [
            BATCHWRIGHT, "run", source, output, "--model", "echo", "--engine", "echo",
            "--max-new-tokens", asked.new_tokens, "--temperature", 0, "--logprobs", 5,
            "--output-logits", "--num-workers", asked.num_workers, "--json", "-q",
        ]  # fmt: skip
        driver = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)
        driver_peak = worker_peak = 0.0
        while driver.poll() is None:
            driver_peak = max(driver_peak, peak_mb(driver.pid))
            worker_peak = max([worker_peak, *map(peak_mb, worker_pids(driver.pid))])
            time.sleep(0.2)
        assert driver.returncode == 0 and driver.stdout is not None
        summary = json.loads(driver.stdout.read())
        size = sum(path.stat().st_size for path in output.glob("part-*"))

    print(f"{asked.rows:,} rows in {summary['seconds']:.1f} s, {size / 1e9:.2f} GB written")
    stages = ("read", "tokenize", "generate", "write")
    print("seconds of workers: " + ", ".join(f"{s} {summary[f'{s}_seconds']:.1f}" for s in stages))
    print(
        json.dumps(
            {
                "rows_per_s": round(asked.rows / summary["seconds"]),
                "tokens_per_s": round(summary["tokens_per_s"]),
                "driver_peak_mb": round(driver_peak),
                "worker_peak_mb": round(worker_peak),
            }
        )
    )


if __name__ == "__main__":
    main()
