"""CTranslate2 answers the prompts of a work file, in float32.

python run_ctranslate2.py WORK MODEL
"""

import json
import sys
import time
from pathlib import Path

import ctranslate2

ROWS_PER_BATCH = 32


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    tokens = json.loads((Path(sys.argv[2]) / "vocabulary.json").read_text("utf-8"))
    model = ctranslate2.Generator(
        sys.argv[2], compute_type="float32", inter_threads=1, intra_threads=work["num_threads"]
    )

    def spell(rows: list[list[int]]) -> list[list[str]]:
        """It takes prompts as the vocabulary's strings only; none is split or joined by this."""
        return [[tokens[i] for i in row] for row in rows]

    def answer(rows: list[list[str]]) -> list[list[int]]:
        results = model.generate_batch(
            rows,
            max_batch_size=ROWS_PER_BATCH,  # Sorted by length, then cut.
            max_length=work["new_tokens"],
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token=[len(tokens)],  # No token, so none ends an answer.
        )
        return [result.sequences_ids[0] for result in results]

    answer(spell(work["warm_up"]))
    prompts = spell(work["prompts"])
    started = time.perf_counter()
    answers = answer(prompts)
    print(json.dumps({"seconds": time.perf_counter() - started, "answers": answers}))


if __name__ == "__main__":
    main()
