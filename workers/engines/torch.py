"""transformers' decoder-only models, run in ragged batches on a CPU or a GPU.

torch and transformers take seconds to import, so that is done when the model is opened: who plans a
job asks what is known of the model, and no more.
"""

import glob
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from jobs.completion import Capture, Completion
from jobs.errors import ModelError
from jobs.model import Device, KernelChoice, ModelFacts, ModelRef
from jobs.prompt import Prompt
from jobs.sampling import RowSampling
from workers.engine import Capabilities
from workers.model import known
from workers.model.build import build_kernels, has_kernels
from workers.model.folder import find_model, find_tokenizer
from workers.pipeline import PipelineLimits
from workers.turns import Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from workers.batch import SampledPipeline

_GPU_DEVICES = ("/dev/nvidia*", "/dev/nvhost*", "/dev/nvmap", "/dev/kfd", "/dev/dxg")
"Without one of these Linux has no GPU that torch could see."


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
        self._turn: AbstractContextManager[object] = Lock()
        "Taken to use the tokenizer: one shard is read while another is answered."

    read_facts = staticmethod(known.read_facts)

    @staticmethod
    def find_device(device: Device) -> str:
        """A GPU if there is one, unless something else is asked for."""
        if device == "cpu" or (device == "auto" and not _may_have_gpu()):
            return "cpu"
        from workers.model import loading

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
            build_kernels()
        return "compiled" if kernels == "compiled" or has_kernels() else "torch"

    @staticmethod
    def spell(model: ModelRef, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        tokenizer = _load_tokenizer(model, find_model(model))
        return [str(tokenizer.decode([token_id])) for token_id in token_ids]

    def open(self) -> "SampledPipeline":
        """Loads weights and tokenizer, and proves that the architecture can be run ragged."""
        from workers.memory import free_memory
        from workers.model import loading
        from workers.model.kernels import load_kernels
        from workers.model.opening import open_ragged, open_slotted

        folder = find_model(self._model)
        if self._facts.has_tokenizer:
            self._tokenizer = _load_tokenizer(self._model, folder)
            if self._tokenizer.is_fast:  # It may be used by two threads at once.
                self._turn = nullcontext()
        model = loading.load_model(self._model, folder, device=self._device, dtype=self._dtype)
        if model.device.type == "cuda":
            self._pipeline = open_slotted(
                model, self._facts, self._limits, is_compiled=self._model.compile
            )
            self._pipeline.warmup_graph_capture()
        else:
            kernels = load_kernels() if self._kernels == "compiled" else None
            self._pipeline = open_ragged(model, self._facts, self._limits, kernels)
            free_memory()  # What the proof has used.
        return self._pipeline

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text.

        One after the other: a list would be spread over every core of the machine, whatever the
        job may use.
        """
        tokenizer, ids = self._tokenizer, []
        assert tokenizer is not None, "the model has no tokenizer"
        for text in texts:
            with self._turn:
                encoded = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
            ids.append(list(encoded["input_ids"]))
        return ids

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """By the tokenizer's chat template, which writes its special tokens itself."""
        from jinja2 import TemplateError

        tokenizer = self._tokenizer
        assert tokenizer is not None, "the model has no tokenizer"
        chat = [{"role": role, "content": content} for role, content in messages]
        try:
            with self._turn:
                text = tokenizer.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=True
                )
        except (TemplateError, TypeError, LookupError) as error:
            raise ValueError(str(error)) from error
        return str(text)

    def decode(self, token_ids: Sequence[Sequence[int]]) -> list[str | None]:
        """Text of each list of ids, special tokens left out; None without a tokenizer."""
        if self._tokenizer is None:
            return [None] * len(token_ids)
        with self._turn:
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
        from workers.complete import complete_batch

        assert self._pipeline is not None, "the engine is not open"
        return complete_batch(self._pipeline, prompts, sampling, capture, self.decode, turns)

    def score(self, prompts: Sequence[Prompt], capture: Capture) -> list[Completion]:
        """Scores a batch."""
        from workers.complete import score_batch

        assert self._pipeline is not None, "the engine is not open"
        return score_batch(self._pipeline, prompts, capture)


def _may_have_gpu() -> bool:
    return sys.platform != "linux" or any(glob.glob(pattern) for pattern in _GPU_DEVICES)


def _load_tokenizer(model: ModelRef, folder: Path) -> "PreTrainedTokenizerBase":
    from workers.model import loading

    return loading.load_tokenizer(
        find_tokenizer(model, folder), trust_remote_code=model.trust_remote_code
    )
