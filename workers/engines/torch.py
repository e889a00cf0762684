"""transformers' decoder-only models, run in ragged batches on a CPU or a GPU."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from jobs.completion import Capture, Completion
from jobs.errors import ModelError
from jobs.model import Device, KernelChoice, ModelFacts, ModelRef
from jobs.prompt import Prompt
from jobs.sampling import RowSampling
from workers.batch import SampledPipeline
from workers.complete import complete_batch
from workers.engine import Capabilities
from workers.model import facts as model_facts
from workers.model import loading
from workers.model.folder import find_model, find_tokenizer
from workers.model.kernels import has_kernels, load_kernels
from workers.model.opening import open_ragged, open_slotted
from workers.pipeline import PipelineLimits
from workers.turns import Turns


class TorchEngine:
    """A transformers model behind the engine's seam."""

    capabilities = Capabilities(
        logits=True, max_logprobs=None, packages=("torch", "transformers", "tokenizers")
    )

    def __init__(
        self,
        model: ModelRef,
        facts: ModelFacts,
        limits: PipelineLimits,
        *,
        device: str,
        dtype: str,
        kernels: str,
    ) -> None:
        self._model = model
        self._facts = facts
        self._limits = limits
        self._device = device
        self._dtype = dtype
        self._kernels = kernels
        self._pipeline: SampledPipeline | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None

    read_facts = staticmethod(model_facts.read_facts)

    @staticmethod
    def find_device(device: Device) -> str:
        """A GPU if there is one, unless something else is asked for."""
        return loading.find_device(device)

    @staticmethod
    def find_kernels(kernels: KernelChoice, device: str, dtype: str) -> str:
        """The compiled attention where it can be had, and PyTorch's elsewhere."""
        if kernels == "compiled" and (device, dtype) != ("cpu", "float32"):
            raise ModelError(
                f"the compiled attention runs float32 on a CPU, not {dtype} on {device}. Use "
                "--kernels torch or auto."
            )
        if kernels == "torch" or (device, dtype) != ("cpu", "float32"):
            return "torch"
        if kernels == "compiled":
            load_kernels()
        return "compiled" if kernels == "compiled" or has_kernels() else "torch"

    @staticmethod
    def spell(model: ModelRef, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        tokenizer = _load_tokenizer(model, find_model(model))
        return [str(tokenizer.decode([token_id])) for token_id in token_ids]

    def open(self) -> SampledPipeline:
        """Loads weights and tokenizer, and proves that the architecture can be run ragged."""
        folder = find_model(self._model)
        if self._facts.has_tokenizer:
            self._tokenizer = _load_tokenizer(self._model, folder)
        model = loading.load_model(self._model, folder, device=self._device, dtype=self._dtype)
        if model.device.type == "cuda":
            self._pipeline = open_slotted(
                model, self._facts, self._limits, is_compiled=self._model.compile
            )
            self._pipeline.warmup_graph_capture()
        else:
            kernels = load_kernels() if self._kernels == "compiled" else None
            self._pipeline = open_ragged(model, self._facts, self._limits, kernels)
        return self._pipeline

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text."""
        assert self._tokenizer is not None, "the model has no tokenizer"
        ids: list[list[int]] = self._tokenizer(
            list(texts), add_special_tokens=add_special_tokens, verbose=False
        )["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[Sequence[int]]) -> list[str | None]:
        """Text of each list of ids, special tokens left out; None without a tokenizer."""
        if self._tokenizer is None:
            return [None] * len(token_ids)
        texts: Sequence[str] = self._tokenizer.batch_decode(
            [list(ids) for ids in token_ids],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return list(texts)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: RowSampling,
        capture: Capture,
        turns: Turns | None = None,
    ) -> tuple[list[Completion], int]:
        """Answers a batch."""
        assert self._pipeline is not None, "the engine is not open"
        return complete_batch(self._pipeline, prompts, sampling, capture, self.decode, turns)


def _load_tokenizer(model: ModelRef, folder: Path) -> PreTrainedTokenizerBase:
    return loading.load_tokenizer(
        find_tokenizer(model, folder), trust_remote_code=model.trust_remote_code
    )
