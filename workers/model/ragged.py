"""A transformers model driven ragged: prompts packed side by side, then one token a row a step."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from jobs.errors import ModelError
from jobs.sampling import RowSampling
from workers.model.attention import RAGGED, RaggedError, RaggedPass
from workers.model.facts import check_layers
from workers.model.kv_cache import KVCache, RowLength
from workers.model.shape import LayerShape
from workers.pipeline import RowContext

_PROBE = ((5, 3, 7, 2, 6, 3, 4), (2, 6, 4))
"Token ids of two short rows; the first's last three are fed one at a time."
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 3e-1}
"Of the spread of logits. A wrong mask or position is off by the spread itself."


class RaggedForward:
    """A model at work on the rows of one batch. B rows, n live ones, V words."""

    def __init__(
        self,
        model: PreTrainedModel,
        contexts: Sequence[RowContext],
        shapes: dict[int, LayerShape],
        max_length: int,
    ) -> None:
        """Allocates keys and values for the rows, each as long as it may become."""
        self._model = model
        self._device = model.device
        self._prompts = [context.token_ids for context in contexts]
        lengths = [
            RowLength(
                row,
                len(context.token_ids),
                min(max_length, len(context.token_ids) + context.sampling.max_new_tokens),
            )
            for row, context in enumerate(contexts)
        ]
        self._cache = KVCache(lengths, shapes, self._device)
        self._last_ids = torch.zeros(len(contexts), dtype=torch.long, device=self._device)
        self._has_prefilled = False
        self.shapes = shapes

    def next_logits(self) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """The live rows [n] and their logits [n, V]."""
        rows = self._cache.rows
        logits = self._decode(rows) if self._has_prefilled else self._prefill(rows)
        self._has_prefilled = True
        return np.array(rows, np.int64), logits

    def append(self, rows: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None:
        """Takes the tokens that the next step runs."""
        self._last_ids[torch.from_numpy(rows)] = torch.from_numpy(token_ids).to(self._device)

    def release(self, row: int) -> None:
        """Frees a row's keys and values."""
        self._cache.release(row)

    def _prefill(self, rows: list[int]) -> torch.Tensor:
        prompts = [self._prompts[row] for row in rows]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        return self._run(
            torch.tensor([token_id for prompt in prompts for token_id in prompt]),
            torch.cat([torch.arange(len(prompt)) for prompt in prompts]),
            RaggedPass(self._cache, self.shapes, is_prefill=True),
            lengths.cumsum(0) - 1,
        )

    def _decode(self, rows: list[int]) -> torch.Tensor:
        blocks = self._cache.blocks
        positions = [length for block in blocks for length in block.lengths]
        logits = self._run(
            self._last_ids[torch.tensor(rows)],
            torch.tensor(positions),
            RaggedPass(self._cache, self.shapes, is_prefill=False),
            torch.arange(len(rows)),
        )
        for block in blocks:
            block.lengths = [length + 1 for length in block.lengths]
        return logits

    def _run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        ragged: RaggedPass,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """[n, V] at the places wanted: the head is not applied to the others."""
        logits: torch.Tensor = self._model(
            input_ids=token_ids[None].to(self._device),
            position_ids=positions[None].to(self._device),
            use_cache=False,
            logits_to_keep=wanted.to(self._device),
            ragged=ragged,
        ).logits
        return logits[0]


def prove_ragged(model: PreTrainedModel) -> dict[int, LayerShape]:
    """Runs two short rows ragged, and each alone as the architecture's authors wrote it.

    Returns the shapes of the layers. Raises ModelError, by the architecture's name, if the two ways
    disagree: if a layer mixes tokens by other means than attention, or has rules of its own for
    masks and positions.
    """
    name = type(model).__name__
    check_layers(model.config, name)
    prompts = [tuple(min(i, model.config.get_text_config().vocab_size - 1) for i in row)
               for row in _PROBE]  # fmt: skip
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        plain = [
            model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]
            for ids in prompts
        ]
        model.set_attn_implementation(RAGGED)
        try:
            ragged, shapes = _run_probe(model, prompts)
        except (RaggedError, TypeError, RuntimeError) as error:
            raise ModelError(f"{name} cannot be run in ragged batches: {error}.") from error
    _check_shapes(model, name, shapes)
    theirs = torch.cat([alone[-len(ours) :] for alone, ours in zip(plain, ragged, strict=True)])
    ours, theirs = torch.cat(ragged).float(), theirs.float()
    is_number = theirs.isfinite()
    if not is_number.any():
        raise ModelError(
            f"{name}: the logits of a short prompt are no numbers. Its weights are bad."
        )
    spread = float(theirs[is_number].std())
    difference = float((ours - theirs)[is_number].abs().nan_to_num(nan=torch.inf).max())
    if not difference <= _TOLERANCE[model.dtype] * max(spread, 1e-6):
        raise ModelError(
            f"{name} cannot be run in ragged batches: its logits differ by {difference:.3g} from "
            f"its own forward pass, where they spread by {spread:.3g}. Use another engine."
        )
    return shapes


def _run_probe(
    model: PreTrainedModel, prompts: list[tuple[int, ...]]
) -> tuple[list[torch.Tensor], dict[int, LayerShape]]:
    """Logits of each row from where it is fed token by token, ending at its last."""
    fed = [prompts[0][-3:], ()]
    contexts = [
        RowContext(prompt[: len(prompt) - len(tail)], RowSampling(max_new_tokens=4), 0)
        for prompt, tail in zip(prompts, fed, strict=True)
    ]
    forward = RaggedForward(model, contexts, {}, max_length=64)
    rows, logits = forward.next_logits()
    by_row = {row: [logits[place]] for place, row in enumerate(rows.tolist())}
    forward.release(1)
    for token_id in fed[0]:
        forward.append(np.array([0]), np.array([token_id]))
        by_row[0].append(forward.next_logits()[1][0])
    return [torch.stack(by_row[row]) for row in (0, 1)], forward.shapes


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
