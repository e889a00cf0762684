"""OpenVINO GenAI answers the prompts of a work file: continuous batching, float32 throughout.

python run_openvino.py WORK MODEL
"""

import json
import sys
import time
from pathlib import Path

import numpy
import openvino
import openvino_genai

SEQUENCES = 64
"Run together."


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    schedule = openvino_genai.SchedulerConfig()
    schedule.max_num_seqs = SEQUENCES
    schedule.enable_prefix_caching = False
    # Left alone these are bfloat16 and float16 on a processor with AMX.
    exact = {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "INFERENCE_NUM_THREADS": work["num_threads"],
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(sys.argv[2], schedule, "CPU", exact)
    settings = openvino_genai.GenerationConfig()
    settings.do_sample = False
    settings.ignore_eos = True
    settings.max_new_tokens = work["new_tokens"]
    settings.logprobs = work["logprobs"]

    def answer(rows: list[list[int]]) -> list[list[int]]:
        prompts = [openvino.Tensor(numpy.array([row], dtype=numpy.int64)) for row in rows]
        results = pipeline.generate(prompts, [settings] * len(rows))
        return [result.m_generation_ids[0] for result in results]

    answer(work["warm_up"])
    started = time.perf_counter()
    answers = answer(work["prompts"])
    print(json.dumps({"seconds": time.perf_counter() - started, "answers": answers}))


if __name__ == "__main__":
    main()
