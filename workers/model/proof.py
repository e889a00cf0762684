"""The proof that an architecture can be run ragged, made when a model is opened."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from jobs.errors import ModelError
from jobs.sampling import RowSampling
from workers.model.attention import RAGGED, RaggedError
from workers.model.facts import check_layers
from workers.model.gates import replace_gates
from workers.model.kernels import Kernels
from workers.model.linears import pack_linears
from workers.model.norms import replace_norms
from workers.model.ragged import RaggedForward
from workers.model.rotary import replace_rotary
from workers.model.shape import LayerShape
from workers.pipeline import RowContext

PROBE_TOKENS = 64
"Room for all rows of a probe."
_PROBES = 3
_PROBE_LENGTHS = (7, 3)
"So many pairs of short rows."
_FED = 3
"The last tokens of the longer ones are fed one at a time, when the shorter ones have ended."
_TOLERANCES = {
    torch.float32: (1.0, 1e-3),
    torch.float16: (0.5, 0.1),
    torch.bfloat16: (0.5, 0.4),
}
"""Which share of the places must be how close, as a share of the spread of their logits.

A wrong mask or position is off by the spread itself. In half precision an architecture's own two
ways to attend are 0.01 and 0.1 apart, and far more at a place here and there.
"""


class ProbedForward(Protocol):
    """A forward pass that finds out the shapes of the layers as it meets them."""

    @property
    def shapes(self) -> dict[int, LayerShape]:
        """By layer."""

    def admit(self, rows: Sequence[int]) -> None: ...

    def next_logits(self) -> tuple[npt.NDArray[np.int64], torch.Tensor]: ...

    def append(self, rows: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None: ...

    def release(self, row: int) -> None: ...


def prove_ragged(
    model: PreTrainedModel,
    kernels: Kernels | None = None,
    make_forward: Callable[[Sequence[RowContext]], ProbedForward] | None = None,
) -> dict[int, LayerShape]:
    """Makes a model ready to run ragged, and proves that it still is the same model.

    make_forward: what is to be proved; a RaggedForward if not given.

    Short rows are run alone, as the architecture's authors wrote it, and then ragged, with what was
    put in the place of its layers. Returns the shapes of the layers. Raises ModelError, by the
    architecture's name, if the two ways disagree: if a layer mixes tokens by other means than
    attention, or has rules of its own for masks and positions.
    """
    make_forward = make_forward or (
        lambda contexts: RaggedForward(
            model, contexts, {}, max_length=PROBE_TOKENS, kernels=kernels
        )
    )
    name = type(model).__name__
    check_layers(model.config, name)
    prompts = _make_probes(model.config.get_text_config().vocab_size)
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        plain = [
            model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]
            for ids in prompts
        ]
        model.set_attn_implementation(RAGGED)
        if model.device.type == "cpu":
            if kernels is not None:
                replace_norms(model, kernels)
                replace_gates(model, kernels)
                replace_rotary(model, kernels)
            pack_linears(model)
        try:
            ours, shapes = _run_probes(make_forward, prompts)
        except (RaggedError, TypeError, RuntimeError) as error:
            raise ModelError(f"{name} cannot be run in ragged batches: {error}.") from error
    theirs = [alone[-len(rows) :] for alone, rows in zip(plain, ours, strict=True)]
    _check_shapes(model, name, shapes)
    _check_logits(name, torch.cat(ours).float(), torch.cat(theirs).float(), model.dtype)
    return shapes


def _make_probes(vocab_size: int) -> list[tuple[int, ...]]:
    """Ids from where a vocabulary has its common words, not its control tokens."""
    generator = torch.Generator().manual_seed(0)
    low = vocab_size // 50
    high = max(vocab_size // 2, low + 1)
    return [
        tuple(torch.randint(low, high, (length,), generator=generator).tolist())
        for length in _PROBE_LENGTHS * _PROBES
    ]


def _check_logits(name: str, ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    """Compares place by place [places, V], leaving out where the model's own are no numbers."""
    is_number = theirs.isfinite().all(dim=1)
    if not is_number.any():
        raise ModelError(
            f"{name}: the logits of short prompts are no numbers. Its weights are bad."
        )
    ours, theirs = ours[is_number], theirs[is_number]
    spread = (theirs - theirs.mean(dim=1, keepdim=True)).norm(dim=1).clamp(min=1e-6)
    off = ((ours - theirs).norm(dim=1) / spread).nan_to_num(nan=torch.inf)
    share, tolerance = _TOLERANCES[dtype]
    worst = float(off.sort().values[round(share * len(off)) - 1])
    if worst > tolerance:
        raise ModelError(
            f"{name} cannot be run in ragged batches: its logits are off its own forward pass by "
            f"{worst:.2g} of their spread. It needs an engine of its own."
        )


def _run_probes(
    make_forward: Callable[[Sequence[RowContext]], ProbedForward], prompts: list[tuple[int, ...]]
) -> tuple[list[torch.Tensor], dict[int, LayerShape]]:
    """Logits of each row from where it is fed token by token, ending at its last.

    All rows are one batch: on a CPU every pass reads all weights, whatever it is for.
    """
    live = [row for row, ids in enumerate(prompts) if len(ids) > _FED]
    contexts = [
        RowContext(ids[:-_FED] if row in live else ids, RowSampling(max_new_tokens=4), 0)
        for row, ids in enumerate(prompts)
    ]
    forward = make_forward(contexts)
    forward.admit(range(len(contexts)))
    rows, logits = forward.next_logits()
    by_row = {row: [logits[place]] for place, row in enumerate(rows.tolist())}
    for row in set(by_row) - set(live):
        forward.release(row)
    for step in range(-_FED, 0):
        forward.append(np.array(live), np.array([prompts[row][step] for row in live]))
        rows, logits = forward.next_logits()
        for place, row in enumerate(rows.tolist()):
            by_row[row].append(logits[place])
    return [torch.stack(by_row[row]) for row in range(len(prompts))], forward.shapes


def _check_shapes(model: PreTrainedModel, name: str, shapes: dict[int, LayerShape]) -> None:
    """Every layer must have come through our attention, with the window that the config names."""
    config = model.config.get_text_config()
    if len(shapes) != config.num_hidden_layers:
        raise ModelError(
            f"{name} cannot be run in ragged batches: attention can be replaced in {len(shapes)} "
            f"of its {config.num_hidden_layers} layers."
        )
    layer_types = getattr(config, "layer_types", None)
    for layer, kind in enumerate(layer_types or ()):
        if (kind == "sliding_attention") != (shapes[layer].window is not None):
            raise ModelError(
                f"{name} cannot be run in ragged batches: layer {layer} has {kind}, but its window "
                f"is {shapes[layer].window}."
            )
    has_window = getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", True
    )
    if not layer_types and has_window and not any(s.window for s in shapes.values()):
        raise ModelError(
            f"{name} cannot be run in ragged batches: its sliding window of "
            f"{config.sliding_window} does not reach the layers."
        )
