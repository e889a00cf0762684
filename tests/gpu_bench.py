"""The figures of gpu_check.py: decode against memory bandwidth, prefill against multiplies.

Both limits are measured on the same device in the same run: a copy within its memory, and a large
multiply in bfloat16. Shapes are those of Llama 3.2 1B and Llama 3.1 8B, with random weights.
"""

import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from jobs.model import ModelFacts
from jobs.sampling import RowSampling, SamplingDefaults
from workers.batch import SampledPipeline
from workers.generate import GenerateIterator
from workers.memory import is_out_of_memory
from workers.model.opening import open_slotted
from workers.pipeline import PipelineLimits, RowContext

Say = Callable[[bool, str], None]
_SHARED = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256}
SHAPES = {
    "1B": {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192,
           "head_dim": 64, "tie_word_embeddings": True} | _SHARED,
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14_336,
           "head_dim": 128, "tie_word_embeddings": False} | _SHARED,
}  # fmt: skip
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
        "tie_word_embeddings": False}  # fmt: skip


@dataclass(frozen=True)
class Load:
    """What is run: rows of so many tokens, and so many new ones. Prefill: one new token each."""

    rows: int
    prompt: int
    new: int


DECODE = [Load(64, 512, 96), Load(256, 512, 96)]
PREFILL = [Load(64, 1024, 1)]
WARM_STEPS = 8


@dataclass(frozen=True)
class Limits:
    """What the device does at most, as measured."""

    bytes_per_s: float
    flops_per_s: float


def bench_shapes(device: torch.device, ends_at: float, say: Say) -> None:
    """Prints a line a figure. A shape that does not fit, or for which no time is left, is named."""
    is_gpu = device.type == "cuda"
    limits = measure_limits(device)
    print(f"      a copy moves {limits.bytes_per_s / 1e12:.2f} TB/s, read and written; a multiply "
          f"runs {limits.flops_per_s / 1e12:.0f} TFLOP/s in bfloat16")  # fmt: skip
    for name, sizes in SHAPES.items() if is_gpu else [("tiny", TINY)]:
        for is_compiled in (False, True) if name == "1B" else (False,):
            words = f"{name}{', compiled' * is_compiled}"
            if time.perf_counter() > ends_at:
                print(f"      {words}: not run, no time is left")
                continue
            try:
                bench_shape(words, sizes, limits, device, is_compiled=is_compiled)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0]
                print(f"      {words}: does not fit into this device's memory: {reason}")
            gc.collect()
            if is_gpu:
                torch.cuda.empty_cache()


def bench_shape(
    name: str, sizes: dict[str, int], limits: Limits, device: torch.device, *, is_compiled: bool
) -> None:
    """Decode step by step and by graphs, then prefill."""
    is_gpu = device.type == "cuda"
    decode = DECODE if is_gpu else [Load(4, 20, 12)]
    prefill = PREFILL if is_gpu else [Load(4, 32, 1)]
    loads = decode + prefill
    length = max(load.prompt + load.new for load in loads)
    config = LlamaConfig(**sizes, max_position_embeddings=length, rope_theta=500_000.0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    facts = ModelFacts(
        "Llama", config.vocab_size, length, (), SamplingDefaults(), False, "bfloat16"
    )
    most = max(load.rows for load in loads)
    pipeline = open_slotted(
        model, facts, PipelineLimits(most, length, most * length), is_compiled=is_compiled
    )
    figures: list[dict[str, object]] = []

    def note(what: str, load: Load, seconds: float, tokens: int, share: float) -> None:
        speed = tokens / seconds
        limit = "the copy's bandwidth" if what.startswith("decode") else "the multiply's FLOP/s"
        print(
            f"      {name}: {what:22} {load.rows:4} rows of {load.prompt}: "
            f"{speed:12,.0f} tokens/s, {share:6.1%} of {limit}",
            flush=True,
        )
        said = {"shape": name, "what": what, **asdict(load)}
        figures.append(said | {"tokens_per_s": round(speed), "share": round(share, 3)})

    for way in ("decode, step by step", "decode, by graphs"):
        if way.endswith("graphs"):
            started = time.perf_counter()
            pipeline.warmup_graph_capture()
            print(f"      {name}: graphs captured: {pipeline.graph_capture_ready}, "
                  f"{time.perf_counter() - started:.1f} s")  # fmt: skip
            if not pipeline.graph_capture_ready:
                continue
        for load in decode:
            seconds, steps = time_decode(pipeline, load, device)
            moved = steps * weight_bytes(model) + cache_bytes(config, load, steps)
            share = moved / seconds / limits.bytes_per_s
            note(way, load, seconds, steps * load.rows, share)
    for load in prefill:
        run_batch(pipeline, load, device)
        seconds = run_batch(pipeline, load, device)
        share = prefill_flops(model, config, load) / seconds / limits.flops_per_s
        note("prefill", load, seconds, load.rows * load.prompt, share)
    print(json.dumps(figures))


def run_batch(pipeline: SampledPipeline, load: Load, device: torch.device) -> float:
    """Seconds of a whole batch."""
    synchronize(device)
    started = time.perf_counter()
    with open_batch(pipeline, load) as batch:
        while not batch.done:
            batch.advance()
    synchronize(device)
    return time.perf_counter() - started


def time_decode(pipeline: SampledPipeline, load: Load, device: torch.device) -> tuple[float, int]:
    """Seconds of the decode steps after some to get warm, and how many they were."""
    with open_batch(pipeline, load) as batch:
        for _ in range(WARM_STEPS):
            batch.advance()
        synchronize(device)
        started = time.perf_counter()
        steps = 0
        while not batch.done:
            batch.advance()
            steps += 1
        synchronize(device)
        return time.perf_counter() - started, steps


def open_batch(pipeline: SampledPipeline, load: Load) -> GenerateIterator:
    """Random prompts that share no beginning, greedy."""
    generator = torch.Generator().manual_seed(load.rows)
    ids = torch.randint(2, pipeline.vocab_size, (load.rows, load.prompt), generator=generator)
    ids[:, 0] = torch.arange(load.rows)
    sampling = RowSampling(load.new, temperature=0.0, ignore_eos=True)
    contexts = [RowContext(tuple(row), sampling, 0) for row in ids.tolist()]
    return GenerateIterator.from_contexts(pipeline, contexts)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes that a decode step reads: all weights but an embedding that is no head."""
    total = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    embedding = model.get_input_embeddings().weight
    unread = 0 if model.config.tie_word_embeddings else embedding.numel()
    return total - unread * embedding.element_size()


def cache_bytes(config: LlamaConfig, load: Load, steps: int) -> int:
    """Bytes of keys and values that the timed steps read."""
    token_bytes = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    lengths = range(load.prompt + load.new - steps, load.prompt + load.new)
    return token_bytes * load.rows * sum(lengths)


def prefill_flops(model: PreTrainedModel, config: LlamaConfig, load: Load) -> float:
    """Of the layers' multiplies and attention that looks back; the head sees one token a row."""
    embedding = config.vocab_size * config.hidden_size
    tables = embedding * (1 if config.tie_word_embeddings else 2)
    layers = sum(weight.numel() for weight in model.parameters()) - tables
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    tokens = load.rows * load.prompt
    return 2 * layers * tokens + attention * tokens * load.prompt + 2 * embedding * load.rows


def measure_limits(device: torch.device) -> Limits:
    """A copy of 4 GB within the device's memory, and a multiply of 8192 x 8192 by the same."""
    is_gpu = device.type == "cuda"
    here = torch.zeros(2**32 if is_gpu else 2**20, dtype=torch.uint8, device=device)
    there = torch.zeros_like(here)
    copy_seconds = time_middle(lambda: there.copy_(here), device)
    size = 8192 if is_gpu else 64
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return Limits(2 * here.numel() / copy_seconds, 2 * size**3 / time_middle(lambda: a @ b, device))


def time_middle(run: Callable[[], object], device: torch.device, rounds: int = 10) -> float:
    """Seconds of one run, the median of some."""
    seconds = []
    for _ in range(rounds):
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)[rounds // 2]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
