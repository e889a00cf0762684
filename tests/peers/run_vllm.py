"""vLLM answers the prompts of a work file on the CPU, in float32.

python run_vllm.py WORK MODEL
"""

import json
import os
import sys
import time
from pathlib import Path

SEQUENCES = 64


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    # Left to itself it computes on one core of two.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["OMP_NUM_THREADS"] = str(work["num_threads"])
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    os.environ["LD_PRELOAD"] = f"{sys.prefix}/lib/libiomp5.so"
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    from vllm import LLM, SamplingParams

    longest = max(map(len, work["prompts"]))
    model = LLM(
        sys.argv[2],
        dtype="float32",
        max_num_seqs=SEQUENCES,
        max_model_len=longest + work["new_tokens"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    settings = SamplingParams(
        temperature=0,
        max_tokens=work["new_tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=work["logprobs"] or None,
    )

    def answer(rows: list[list[int]]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": row} for row in rows]
        outputs = model.generate(prompts, settings, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    answer(work["warm_up"])
    started = time.perf_counter()
    answers = answer(work["prompts"])
    print(json.dumps({"seconds": time.perf_counter() - started, "answers": answers}))


if __name__ == "__main__":
    main()
