"""The one seam between a worker and whatever answers prompts, and the table of engines."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from jobs.completion import Capture, Completion
from jobs.errors import ModelError, SettingError
from jobs.model import (
    Device,
    Dtype,
    KernelChoice,
    ModelFacts,
    ModelRef,
    check_compile,
    settle_dtype,
)
from jobs.prompt import Prompt
from jobs.sampling import RowSampling
from workers.pipeline import BatchPipeline, PipelineLimits
from workers.turns import Turns

ENGINES = {
    "torch": "workers.engines.torch:TorchEngine",
    "echo": "workers.engines.echo:EchoEngine",
}
"By name, where the class stands. Loaded when it is asked for: torch takes seconds to import."


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do. A job that asks for more is refused before any worker starts."""

    logits: bool
    max_logprobs: int | None
    "Most alternatives a token; None for as many as the vocabulary has."
    packages: tuple[str, ...]
    "Packages whose versions may change an answer."
    reads_model: bool = True
    "False if the model's path is a name and nothing more."


class Engine(Protocol):
    """A model that turns prompts into completions."""

    capabilities: Capabilities

    def __init__(
        self,
        model: ModelRef,
        facts: ModelFacts,
        limits: PipelineLimits,
        *,
        device: str,
        dtype: str,
        kernels: str,
    ) -> None: ...

    @staticmethod
    def read_facts(model: ModelRef) -> ModelFacts:
        """What is known of the model before it is loaded. Raises ModelError if there is none."""

    @staticmethod
    def find_device(device: Device) -> str:
        """Where the model would run on this machine: cpu or cuda."""

    @staticmethod
    def find_kernels(kernels: KernelChoice, device: str, dtype: str) -> str:
        """What would compute attention on this machine: compiled or torch.

        Raises ModelError if what is asked for cannot be had.
        """

    @staticmethod
    def spell(model: ModelRef, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself. Raises ModelError if there is no tokenizer."""

    def open(self) -> BatchPipeline:
        """Loads the model. Raises ModelError if it cannot be loaded or run."""

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text. Called while another thread generates, too."""

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """A conversation as text that the assistant's turn follows. messages: role and content.

        Raises ValueError if the chat template cannot be applied.
        """

    def decode(self, token_ids: Sequence[Sequence[int]]) -> list[str | None]:
        """Text of each list of ids, special tokens left out; None if there is no tokenizer."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: RowSampling,
        capture: Capture,
        turns: Turns | None = None,
    ) -> tuple[list[Completion], int]:
        """Answers a batch, in order. Also returns its places times the steps it took.

        turns: how many rows are live at a time. None: all.
        """

    def score(self, prompts: Sequence[Prompt], capture: Capture) -> list[Completion]:
        """Scores what prompts ask for, in order."""


def load_engine(name: str) -> type[Engine]:
    """The class of an engine. Raises SettingError if there is none of that name."""
    if name not in ENGINES:
        raise SettingError(f"there is no engine {name!r}. There are: {', '.join(ENGINES)}.")
    module_name, class_name = ENGINES[name].split(":")
    engine: type[Engine] = getattr(import_module(module_name), class_name)
    return engine


def open_pipeline(
    model: str,
    *,
    max_batch_size: int = 64,
    max_length: int | None = None,
    max_prefill_tokens: int | None = None,
    engine: str = "torch",
    revision: str | None = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: KernelChoice = "auto",
    compile: bool = False,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> BatchPipeline:
    """Opens a model by name, ready for generate(): a folder, a hub id, a GGUF file, or demo.

    max_length: most tokens of a row, prompt and answer together; the model's own if not given.
    max_prefill_tokens: most tokens of all prompts of a batch; as many as fit if not given.
    engine: torch, or echo, which needs no model.

    Raises ModelError if the model cannot be loaded, or holds fewer tokens than max_length.
    """
    reference = ModelRef(
        path=model,
        engine=engine,
        revision=revision,
        dtype=dtype,
        device=device,
        kernels=kernels,
        compile=compile,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    engine_class = load_engine(engine)
    facts = engine_class.read_facts(reference)
    length = settle_max_length(max_length, facts)
    if max_prefill_tokens is None:
        max_prefill_tokens = max_batch_size * length
    limits = PipelineLimits(max_batch_size, length, max_prefill_tokens)
    place = engine_class.find_device(device)
    check_compile(reference, place)
    number_type = settle_dtype(reference, facts, place)
    opened = engine_class(
        reference,
        facts,
        limits,
        device=place,
        dtype=number_type,
        kernels=engine_class.find_kernels(kernels, place, number_type),
    )
    return opened.open()


def settle_max_length(asked: int | None, facts: ModelFacts) -> int:
    """Most tokens of a row. Raises ModelError if more are asked for than the model holds."""
    if asked is not None and asked > facts.max_length:
        raise ModelError(
            f"rows of {asked} tokens were asked for, but {facts.architecture} holds "
            f"{facts.max_length}. Ask for at most that."
        )
    return facts.max_length if asked is None else asked
