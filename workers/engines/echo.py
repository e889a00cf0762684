"""An engine without a model: bytes for tokens, and logits that are a pure function of the ids.

Tests, dry runs and first days: everything around the model can be tried in full, at full speed.
The next logits depend on the row's ids and the model's name alone, as a model's do on its weights.
"""

import zlib
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from jobs.completion import Capture, Completion
from jobs.errors import ModelError
from jobs.model import Device, KernelChoice, ModelFacts, ModelRef
from jobs.prompt import Prompt
from jobs.sampling import RowSampling, SamplingDefaults
from jobs.scoring import ScoreRequest
from workers.batch import SampledPipeline
from workers.complete import complete_batch, score_batch
from workers.engine import Capabilities
from workers.engines import faults
from workers.model.readout import Readout
from workers.pipeline import PipelineLimits, RowContext, TokenScores
from workers.turns import Turns

VOCAB_SIZE = 257
EOS = 256
MAX_LENGTH = 8192

_ODD = np.uint64(0x9E3779B97F4A7C15)
_SPREAD = np.float32(8 / 2**32)
"Logits lie in [0, 8), so that the best token is likely, and not sure."


class EchoEngine:
    """Byte tokens and pseudo-random logits behind the engine's seam."""

    capabilities = Capabilities(
        logits=True, max_logprobs=None, packages=("torch",), reads_model=False
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
        self._is_faulty = model.path == faults.NAME
        model_seed = zlib.crc32(model.path.encode())
        self._pipeline = SampledPipeline(
            facts,
            limits,
            device=torch.device("cpu"),
            make_forward=lambda contexts, _: _EchoForward(model_seed, contexts),
            score=partial(_score, model_seed),
        )

    @staticmethod
    def read_facts(model: ModelRef) -> ModelFacts:
        """The same for every name."""
        return ModelFacts(
            architecture="Echo",
            vocab_size=VOCAB_SIZE,
            max_length=MAX_LENGTH,
            eos_token_ids=(EOS,),
            defaults=SamplingDefaults(),
            has_tokenizer=True,
            has_chat_template=True,
            dtype="float32",
            first_token_id=EOS,
        )

    @staticmethod
    def find_device(device: Device) -> str:
        """Always the CPU."""
        if device == "cuda":
            raise ModelError("the echo engine runs on the CPU. Use --device cpu or auto.")
        return "cpu"

    @staticmethod
    def find_kernels(kernels: KernelChoice, device: str, dtype: str) -> str:
        """There is nothing to compile."""
        return "torch"

    @staticmethod
    def spell(model: ModelRef, token_ids: Sequence[int]) -> list[str]:
        """The character that each byte is in Latin-1."""
        return ["<eos>" if token_id == EOS else chr(token_id) for token_id in token_ids]

    def open(self) -> SampledPipeline:
        """There is nothing to load."""
        return self._pipeline

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """The bytes of each text as UTF-8."""
        if self._is_faulty:
            faults.spoil_texts(texts)
        return [list(text.encode()) for text in texts]

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """A line a message."""
        lines = [f"{role}: {content}\n" for role, content in messages]
        return "".join([*lines, "assistant: "])

    def decode(self, token_ids: Sequence[Sequence[int]]) -> list[str | None]:
        """Bytes as text, with a replacement character for what is no UTF-8."""
        return [
            bytes(token_id for token_id in ids if token_id != EOS).decode(errors="replace")
            for ids in token_ids
        ]

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: RowSampling,
        capture: Capture,
        turns: Turns | None = None,
    ) -> tuple[list[Completion], int]:
        """Answers a batch."""
        if self._is_faulty:
            faults.play_faults(prompts, turns)
        return complete_batch(self._pipeline, prompts, sampling, capture, self.decode, turns)

    def score(self, prompts: Sequence[Prompt], capture: Capture) -> list[Completion]:
        """Scores a batch."""
        if self._is_faulty:
            faults.play_faults(prompts, None)
        return score_batch(self._pipeline, prompts, capture)


class _EchoForward:
    """A hash of each row's ids, and logits made of it."""

    def __init__(self, model_seed: int, contexts: Sequence[RowContext]) -> None:
        self._hashes = np.array(
            [zlib.crc32(_to_bytes(context.token_ids), model_seed) for context in contexts],
            np.uint64,
        )
        self._words = np.arange(1, VOCAB_SIZE + 1, dtype=np.uint64) * _ODD
        self._live: list[int] = []

    def admit(self, rows: Sequence[int]) -> None:
        """Takes in rows."""
        self._live += rows

    def next_logits(self) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """The live rows [n] and their logits [n, 257]."""
        rows = np.array(self._live, np.int64)
        mixed = _mix(self._hashes[rows, None] ^ self._words)
        logits = (mixed >> np.uint64(32)).astype(np.float32) * _SPREAD
        return rows, torch.from_numpy(logits)

    def best_ids(self) -> None:
        """The sampler looks for them itself."""

    def append(self, rows: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None:
        """Takes the tokens that follow."""
        self._hashes[rows] = _mix(self._hashes[rows] * _ODD + token_ids.astype(np.uint64))

    def release(self, row: int) -> None:
        """Drops a row."""
        self._live.remove(row)


def _score(
    model_seed: int, requests: Sequence[ScoreRequest], num_top: int, keeps_logits: bool
) -> list[TokenScores]:
    """Each token behind a context, by the logits that the tokens before it have."""
    scores = []
    for request in requests:
        context, given = request.token_ids[: request.num_context], request.token_ids
        forward = _EchoForward(model_seed, [RowContext(context, RowSampling(1), 0)])
        forward.admit([0])
        logits = []
        for token_id in given[request.num_context :]:
            rows, row_logits = forward.next_logits()
            logits.append(row_logits)
            forward.append(rows, np.array([token_id]))
        ids = torch.tensor(given[request.num_context :])
        scores.append(
            Readout(None).score(
                torch.cat(logits), torch.arange(len(ids)), ids, num_top, keeps_logits=keeps_logits
            )
        )
    return scores


def _to_bytes(token_ids: Sequence[int]) -> bytes:
    return np.array(token_ids, np.int32).tobytes()


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scatters 64 bits, one to one. The finalizer of splitmix64; Steele, Lea and Flood 2014."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
