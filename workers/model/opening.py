"""From a loaded model to a pipeline: proved, and with the forward pass of its device."""

import logging
from collections.abc import Sequence

from transformers import PreTrainedModel

from jobs.errors import ModelError
from jobs.model import ModelFacts
from workers.batch import SampledPipeline
from workers.model.compiled import compile_layers
from workers.model.flash import Flash, find_flash
from workers.model.kernels import Kernels
from workers.model.kv_cache import PagePool
from workers.model.proof import PROBE_TOKENS, prove_ragged
from workers.model.ragged import RaggedForward
from workers.model.scoring import Scorer
from workers.model.shape import LayerShape
from workers.model.slots import SlotCache, fit_capacity
from workers.model.slotted import SlottedForward, SlottedModel
from workers.pipeline import PipelineLimits, RowContext

logger = logging.getLogger(__name__)


def open_ragged(
    model: PreTrainedModel,
    facts: ModelFacts,
    limits: PipelineLimits,
    kernels: Kernels | None = None,
) -> SampledPipeline:
    """A pipeline for a CPU: keys and values in pages that batches hand on.

    Raises ModelError if the architecture cannot be run so.
    """
    shapes = prove_ragged(model, kernels)
    pool = PagePool(model.device)
    return SampledPipeline(
        facts,
        limits,
        device=model.device,
        make_forward=lambda contexts, turns: RaggedForward(
            model,
            contexts,
            dict(shapes),
            limits.max_length,
            turns=turns,
            kernels=kernels,
            pool=pool,
        ),
        score=Scorer(model, shapes, kernels, pool).score,
        kernels=kernels,
    )


def open_slotted(
    model: PreTrainedModel,
    facts: ModelFacts,
    limits: PipelineLimits,
    *,
    is_compiled: bool = False,
) -> SampledPipeline:
    """A pipeline for a GPU: one static cache, which takes most of the memory that is free.

    Raises ModelError if the architecture cannot be run so.
    """
    flash, shapes = prove_slotted(model, find_flash(model.device))
    if is_compiled:
        compile_layers(model)
    # One row more than can be open, for what prompts begin with.
    wanted = (limits.max_batch_size + 1) * limits.max_length
    cache = SlotCache(
        fit_capacity(wanted, shapes, model.device), limits.max_batch_size, model.device
    )
    slotted = SlottedModel(
        model,
        cache,
        flash,
        shapes,
        max_length=limits.max_length,
        max_rows=limits.max_batch_size,
    )
    return SampledPipeline(
        facts,
        limits,
        device=model.device,
        make_forward=lambda contexts, turns: SlottedForward(slotted, contexts, turns=turns),
        score=Scorer(model, shapes, None, PagePool(model.device)).score,
        capture_graphs=slotted.capture_graphs,
    )


def prove_slotted(
    model: PreTrainedModel, flash: Flash | None
) -> tuple[Flash | None, dict[int, LayerShape]]:
    """The shapes of the layers, and flash attention if it computes the same as the model's own.

    Raises ModelError if PyTorch's plain attention does not either.
    """

    def make_forward(contexts: Sequence[RowContext]) -> SlottedForward:
        cache = SlotCache(PROBE_TOKENS, len(contexts), model.device)
        slotted = SlottedModel(
            model, cache, flash, {}, max_length=PROBE_TOKENS, max_rows=len(contexts)
        )
        return SlottedForward(slotted, contexts)

    try:
        return flash, prove_ragged(model, make_forward=make_forward)
    except ModelError as error:
        if flash is None:
            raise
        logger.warning("flash attention is not used, which is slower: %s", error)
        return prove_slotted(model, None)
