"""Ragged attention: rows of unlike length in one pass, none padded, none seeing another.

Registered with transformers as the attention of every layer. transformers computes queries, keys
and values, rotated and normalised as the architecture has it; here they are stored and attended.

Letters: T tokens of all rows, G query heads a key-value head, H key-value heads, D numbers a head,
S tokens of a stretch of a prompt, L tokens of a row, n rows of a step.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from workers.model.kernels import Kernels
from workers.model.kv_cache import PAGE
from workers.model.shape import AttentionSettings, LayerShape
from workers.model.steps import DecodeStep, PromptSpan, Step

RAGGED = "batchwright_ragged"
"The name under which transformers finds this attention."

_QUERIES_PER_PIECE = 512
"Scores under a mask are made for so many queries at a time."


class RaggedError(RuntimeError):
    """The architecture uses attention in a way that ragged batches do not cover."""


class Pass(Protocol):
    """One forward pass, which knows where its tokens stand and where their keys are kept."""

    shapes: dict[int, LayerShape]
    "By layer, filled as the layers are met."

    def attend(
        self,
        layer: int,
        settings: AttentionSettings,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Stores keys and values [H, T, D] and attends query [G * H, T, D] -> [T, G * H, D]."""


class RaggedPass:
    """A pass over steps whose keys and values stand in pages."""

    def __init__(
        self, steps: Sequence[Step], shapes: dict[int, LayerShape], kernels: Kernels | None
    ) -> None:
        self.steps = steps
        self.shapes = shapes
        self.kernels = kernels

    def attend(
        self,
        layer: int,
        settings: AttentionSettings,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Step by step: each attends to its own rows."""
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        start = 0
        for step in self.steps:
            step.cache.pages.allocate(layer, self.shapes[layer])
            piece = slice(start, start + step.num_tokens)
            new = query[:, piece], key[:, piece], value[:, piece]
            kernels = self.kernels if key.dtype == torch.float32 else None
            if isinstance(step, PromptSpan):
                if kernels is None:
                    output[piece] = _attend_prompt(step, layer, settings, *new)
                else:
                    kernels.prompt(step, layer, settings, *new, output[piece])
            elif kernels is None:
                output[piece] = _decode(step, layer, settings, *new)
            else:
                kernels.decode(step, layer, settings, *new, output[piece])
            start += step.num_tokens
        return output


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    ragged: Pass | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """query [1, G * H, T, D], key and value [1, H, T, D] -> [1, T, G * H, D].

    Raises RaggedError if the architecture does not say which pass this is, or asks for something
    that is not done here.
    """
    if ragged is None:
        raise RaggedError("attention is called without the pass it belongs to")
    if kwargs.get("s_aux") is not None:
        raise RaggedError("attention sinks are not supported")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    shape = LayerShape(key.shape[1], key.shape[3], value.shape[3], key.dtype, sliding_window)
    ragged.shapes[layer] = shape
    settings = AttentionSettings(scaling or query.shape[3] ** -0.5, sliding_window, softcap or None)
    return ragged.attend(layer, settings, query[0], key[0], value[0])[None], None


AttentionInterface.register(RAGGED, ragged_attention)


def _attend_prompt(
    span: PromptSpan,
    layer: int,
    settings: AttentionSettings,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Stores a stretch of a prompt, and attends it to itself and to what is before it.

    query [G * H, S, D], key and value [H, S, D]. Returns [S, G * H, D].
    """
    places = span.cache.places(span.row, span.start, span.stop)
    span.cache.store(layer, places, key, value)
    if span.start:
        row, length = np.array([span.row]), torch.tensor([span.stop], device=key.device)
        [key], [value] = span.cache.gather(layer, key.shape[2], row, length)
    grouped = group_heads(query, 0, key.shape[0])  # [H, G, S, D]
    attended = attend_causally(grouped, key, value, settings)
    return attended.flatten(0, 1).transpose(0, 1)  # [S, G * H, D]


def group_heads(query: torch.Tensor, dim: int, num_kv_heads: int) -> torch.Tensor:
    """Splits the query heads in dim by the key-value head that they share: G * H -> H, G."""
    return query.reshape(*query.shape[:dim], num_kv_heads, -1, *query.shape[dim + 1 :])


def attend_causally(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: AttentionSettings
) -> torch.Tensor:
    """query [H, G, S, D], key and value [H, L, D] -> [H, G, S, D], each looking back only.

    The queries are those of the last S of L tokens.
    """
    length, window = key.shape[1], settings.window
    before = length - query.shape[2]
    key, value = (x[:, None].expand(-1, query.shape[1], -1, -1) for x in (key, value))
    if not before and settings.softcap is None and (window is None or length <= window):
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=settings.scaling
        )
    pieces = []
    for start in range(before, length, _QUERIES_PER_PIECE):
        stop = min(start + _QUERIES_PER_PIECE, length)
        first = 0 if window is None else max(0, start - window + 1)
        queries = torch.arange(start, stop, device=query.device)[:, None]
        places = torch.arange(first, stop, device=query.device)[None]
        is_seen = places <= queries
        if window is not None:
            is_seen &= places > queries - window
        pieces.append(
            attend(
                query[:, :, start - before : stop - before],
                key[:, :, first:stop],
                value[:, :, first:stop],
                torch.where(is_seen, 0.0, -torch.inf).to(query.dtype),
                settings,
            )
        )
    return torch.cat(pieces, dim=2)


def _decode(
    step: DecodeStep,
    layer: int,
    settings: AttentionSettings,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Stores one token a row, and attends it to what its row has stored.

    query [G * H, n, D], key and value [H, n, D]. Returns [n, G * H, D]. The query heads of a
    key-value head stand where tokens would, so that keys are not repeated.
    """
    table = torch.from_numpy(step.cache.table[step.rows].astype(np.int64)).to(key.device)
    pages = table.gather(1, step.written[:, None] // PAGE)[:, 0]
    step.cache.store(layer, (pages, step.written % PAGE), key, value)
    keys, values = step.cache.gather(layer, key.shape[2], step.rows, step.written + 1)
    grouped = group_heads(query.transpose(0, 1), 1, key.shape[0])  # [n, H, G, D]
    mask = step.mask(settings.window, query.dtype)
    return attend(grouped, keys, values, mask, settings).flatten(1, 2)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    settings: AttentionSettings,
) -> torch.Tensor:
    """Softmax attention with a mask that is added, and scores capped if the model caps them."""
    if settings.softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=settings.scaling
        )
    scores = query @ key.transpose(-1, -2) * settings.scaling
    scores = torch.tanh(scores / settings.softcap) * settings.softcap
    if mask is not None:
        scores = scores + mask
    return scores.float().softmax(dim=-1).to(query.dtype) @ value
