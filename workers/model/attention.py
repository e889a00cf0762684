"""Ragged attention: rows of unlike length in one pass, none padded, none seeing another.

Registered with transformers as the attention of every layer. transformers computes queries, keys
and values, rotated and normalised as the architecture has it; here they are stored and attended.

    prefill   tokens of all rows side by side, each row attending to itself
              |row 4 . . . . . . |row 1 . . . . . |row 0 . .|row 3 . .|
    decode    one token a row, each attending to the keys of its row

Letters: T tokens of all rows, G query heads a key-value head, H key-value heads, D numbers a head,
L tokens of a row, n rows of a block.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from workers.model.kv_cache import KVBlock, KVCache
from workers.model.shape import LayerShape

RAGGED = "batchwright_ragged"
"The name under which transformers finds this attention."

_QUERIES_PER_PIECE = 512
"A window or a soft cap needs the scores in the open; so many rows of them at a time."


class RaggedError(RuntimeError):
    """The architecture uses attention in a way that ragged batches do not cover."""


class RaggedPass:
    """One forward pass: what it runs over, and what it has learnt of the layers."""

    def __init__(self, cache: KVCache, shapes: dict[int, LayerShape], *, is_prefill: bool) -> None:
        self.is_prefill = is_prefill
        self.shapes = shapes
        "By layer, filled as the layers are met."
        self.blocks = [_BlockStep(block) for block in cache.blocks]


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
    ragged: RaggedPass | None = None,
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
    ragged.shapes[layer] = LayerShape(
        key.shape[1], key.shape[3], value.shape[3], key.dtype, sliding_window
    )
    settings = _Settings(scaling or query.shape[3] ** -0.5, sliding_window, softcap or None)
    output = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    start = 0
    for step in ragged.blocks:
        block = step.block
        if layer not in block.keys:
            block.allocate(layer, ragged.shapes[layer])
        stop = start + (sum(block.lengths) if ragged.is_prefill else len(block.rows))
        piece = slice(start, stop)
        run = _prefill if ragged.is_prefill else _decode
        run(step, layer, settings, query[0, :, piece], key[0, :, piece], value[0, :, piece],
            output[piece])  # fmt: skip
        start = stop
    return output[None], None


AttentionInterface.register(RAGGED, ragged_attention)


@dataclass(frozen=True, slots=True)
class _Settings:
    scaling: float
    window: int | None
    softcap: float | None


class _BlockStep:
    """A block in one step: where its rows write, and what they see, made once for all layers."""

    def __init__(self, block: KVBlock) -> None:
        self.block = block
        self.places = torch.arange(len(block.rows), device=block.device)
        self.written = torch.tensor(block.lengths, device=block.device)
        self.longest = max(block.lengths) + 1
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """[n, 1, 1, L] to be added to scores; None if every row sees all of the longest."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window, dtype)
        return self._masks[window]

    def _make_mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        is_even = min(self.block.lengths) + 1 == self.longest
        if is_even and (window is None or self.longest <= window):
            return None
        positions = torch.arange(self.longest, device=self.block.device)[None]
        is_seen = positions <= self.written[:, None]
        if window is not None:
            is_seen &= positions > self.written[:, None] - window
        return torch.where(is_seen, 0.0, -torch.inf).to(dtype)[:, None, None]


def _prefill(
    step: _BlockStep,
    layer: int,
    settings: _Settings,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Stores and attends a block's prompts, row by row, into output [tokens, G * H, D]."""
    block = step.block
    num_kv_heads = key.shape[0]
    start = 0
    for place, length in enumerate(block.lengths):
        piece = slice(start, start + length)
        row_key, row_value = key[:, piece], value[:, piece]
        block.keys[layer][place, :, :length] = row_key
        block.values[layer][place, :, :length] = row_value
        grouped = _group(query[:, piece], 0, num_kv_heads)  # [H, G, L, D]
        attended = _attend_causally(grouped, row_key, row_value, settings)
        output[piece] = attended.flatten(0, 1).transpose(0, 1)  # [L, G * H, D]
        start += length


def _group(query: torch.Tensor, dim: int, num_kv_heads: int) -> torch.Tensor:
    """Splits the query heads in dim by the key-value head that they share: G * H -> H, G."""
    return query.reshape(*query.shape[:dim], num_kv_heads, -1, *query.shape[dim + 1 :])


def _attend_causally(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: _Settings
) -> torch.Tensor:
    """query [H, G, L, D], key and value [H, L, D] -> [H, G, L, D], each looking back only."""
    length, window = key.shape[1], settings.window
    key, value = (x[:, None].expand(-1, query.shape[1], -1, -1) for x in (key, value))
    if settings.softcap is None and (window is None or length <= window):
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=settings.scaling
        )
    pieces = []
    for start in range(0, length, _QUERIES_PER_PIECE):
        stop = min(start + _QUERIES_PER_PIECE, length)
        first = 0 if window is None else max(0, start - window + 1)
        queries = torch.arange(start, stop, device=query.device)[:, None]
        keys = torch.arange(first, stop, device=query.device)[None]
        is_seen = keys <= queries
        if window is not None:
            is_seen &= keys > queries - window
        pieces.append(
            _attend(
                query[:, :, start:stop],
                key[:, :, first:stop],
                value[:, :, first:stop],
                torch.where(is_seen, 0.0, -torch.inf).to(query.dtype),
                settings,
            )
        )
    return torch.cat(pieces, dim=2)


def _decode(
    step: _BlockStep,
    layer: int,
    settings: _Settings,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Appends one token a row, and attends it to what its row has stored, into output.

    The query heads of a key-value head stand where tokens would, so that keys are not repeated.
    """
    keys, values = step.block.keys[layer], step.block.values[layer]
    keys[step.places, :, step.written] = key.transpose(0, 1)
    values[step.places, :, step.written] = value.transpose(0, 1)
    num_rows = len(step.places)
    grouped = _group(query.transpose(0, 1), 1, key.shape[0])  # [n, H, G, D]
    attended = _attend(
        grouped,
        keys[:num_rows, :, : step.longest],
        values[:num_rows, :, : step.longest],
        step.mask(settings.window, query.dtype),
        settings,
    )
    output.copy_(attended.flatten(1, 2))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    settings: _Settings,
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
