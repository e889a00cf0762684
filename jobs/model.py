"""Which model a job runs, and what is known of it before its weights are loaded."""

from dataclasses import dataclass
from typing import Literal, get_args

from jobs.errors import ModelError, SettingError
from jobs.sampling import SamplingDefaults

DEMO = "demo"
"The word for a small model that a package carries."

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
KernelChoice = Literal["auto", "compiled", "torch"]


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model, and everything about running it that can change a byte of output."""

    path: str
    "A local folder, a GGUF file, a hub id, or the word demo."
    engine: str = "torch"
    revision: str | None = None
    tokenizer: str | None = None
    "A folder or hub id of another tokenizer than the model's own."
    dtype: Dtype = "auto"
    "auto: float32 on a CPU, the checkpoint's own on a GPU."
    device: Device = "auto"
    "auto: a GPU if there is one, else the CPU."
    kernels: KernelChoice = "auto"
    "What computes attention on a CPU. auto: compiled where there is a C compiler, else PyTorch."
    threads: int = 1
    "CPU threads a worker computes with: sums are grouped by thread, so the last bits depend on it."
    compile: bool = False
    "Compiles norms and feed-forward layers with torch.compile, on a GPU. Last bits may differ."
    trust_remote_code: bool = False
    allow_pickle: bool = False
    "Loads pickled weights, which can run any code they like while they are read."

    def __post_init__(self) -> None:
        for name, choices in (
            ("dtype", get_args(Dtype)),
            ("device", get_args(Device)),
            ("kernels", get_args(KernelChoice)),
        ):
            if getattr(self, name) not in choices:
                raise SettingError(
                    f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}."
                )


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's files say, read without its weights."""

    architecture: str
    vocab_size: int
    "Width of a row of logits; the tokenizer may know fewer or more ids."
    max_length: int
    "Most tokens a row may hold, prompt and answer together."
    eos_token_ids: tuple[int, ...]
    "Union of what the tokenizer, the config and the generation config say."
    defaults: SamplingDefaults
    has_tokenizer: bool
    dtype: str
    "Type of the weights as stored."
    added_token_ids: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    "What the tokenizer puts before and after a text unless told not to."
    has_chat_template: bool = False
    first_token_id: int | None = None
    "BOS, else EOS: what stands before a text that is scored from its first token on."
    revision: str | None = None
    "The commit that a hub model was taken from, so that workers take the same one."
    files: tuple[str, ...] = ()
    "Paths of the files that decide what the model answers."
    notes: tuple[str, ...] = ()
    "What a user should know of how this model is run, in sentences."


def settle_dtype(model: ModelRef, facts: ModelFacts, device: str) -> str:
    """The type to compute with: float32 on a CPU, where others are slow, unless one is asked."""
    if model.dtype != "auto":
        return model.dtype
    return "float32" if device == "cpu" else facts.dtype


def check_compile(model: ModelRef, device: str) -> None:
    """Raises ModelError if compiling is asked for where it is not done."""
    if model.compile and device != "cuda":
        raise ModelError(
            f"--compile is for a GPU, and this model runs on {device}, where norms and linear "
            "layers have faster ones in their place. Leave it out."
        )
