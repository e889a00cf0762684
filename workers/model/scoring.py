"""Log-probabilities of tokens that are given: a pass over the prompts, and no step after it.

    a b c x            Rows are run in the order of their tokens, so that each has before it the
    a b c d e f g      one with which it begins longest in common. It reads those tokens' keys and
    a b c              values where they are; what is asked of them, their first runner answers.
                       The third runs nothing of its own.

The head runs over a few positions at a time, and over no position that nothing asks for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from workers.model.attention import RaggedPass
from workers.model.halves import Halves
from workers.model.kernels import Kernels
from workers.model.kv_cache import PAGE, KVCache, PagePool
from workers.model.readout import Readout
from workers.model.shape import LayerShape
from workers.model.steps import PromptSpan, cut_passes
from workers.pipeline import ScoreRequest, TokenScores

_TOKENS_PER_PASS = 1024
"As for prompts that are to be answered: as many as a processor's caches hold activations of."
_LOGITS_BYTES = 2**25
"Most bytes of logits at a time."


@dataclass(frozen=True, slots=True)
class _Node:
    """What is run of a request: its tokens but the last, from where another has not run them."""

    token_ids: tuple[int, ...]
    sharer: int | None
    "The node that has run the first num_shared tokens, or knows who has."
    num_shared: int


@dataclass(frozen=True, slots=True)
class _Want:
    """Positions [start, stop) of a node, each to be asked for a request's next token."""

    request: int
    start: int
    stop: int


class Scorer:
    """Scores requests with one model."""

    def __init__(
        self,
        model: PreTrainedModel,
        shapes: dict[int, LayerShape],
        kernels: Kernels | None,
        pool: PagePool,
    ) -> None:
        """shapes: of the layers, as they were found when the model was proved."""
        self._halves = Halves(model)
        self._vocab_size = model.config.get_text_config().vocab_size
        self._shapes = shapes
        self._kernels = kernels
        self._readout = Readout(kernels)
        self._pool = pool

    def score(self, requests: Sequence[ScoreRequest], num_top: int = 0) -> list[TokenScores]:
        """Scores every request, in order. num_top: K alternatives a token."""
        if not requests:
            return []
        scores = [_empty(len(r.token_ids) - r.num_context, num_top) for r in requests]
        nodes, wants = plan_nodes(requests)
        cache = self._claim(nodes)
        spans = [
            PromptSpan(cache, row, node.token_ids, node.num_shared, len(node.token_ids))
            for row, node in enumerate(nodes)
        ]
        with torch.inference_mode():
            for taken in cut_passes(spans, _TOKENS_PER_PASS):
                for span in taken:
                    self._admit(cache, nodes, span.row)
                states = self._run(taken)
                self._read(states, taken, wants, requests, scores)
                _release(cache, cache.rows[:-1])  # The next node may share with the last alone.
        return scores

    def _claim(self, nodes: Sequence[_Node]) -> KVCache:
        """Room for the node before a pass, and for those of one pass, the last of them cut."""
        sizes = [len(node.token_ids) for node in nodes]
        cache = KVCache(
            self._pool,
            sizes,
            num_tokens=2 * max(sizes) + _TOKENS_PER_PASS,
            num_live=min(len(nodes), _TOKENS_PER_PASS) + 1,
        )
        for layer, shape in self._shapes.items():
            cache.pages.allocate(layer, shape)
        return cache

    def _admit(self, cache: KVCache, nodes: Sequence[_Node], row: int) -> None:
        """Takes in a node, and lets go of one that ended in an earlier pass."""
        if row in cache.rows:
            return  # A piece of it has been run.
        node = nodes[row]
        ended = [r for r in cache.rows if cache.written[r] == len(nodes[r].token_ids)]
        if node.sharer is None:  # Else it must be held until its pages are this one's, too.
            _release(cache, ended)
        cache.admit(row, node.num_shared, node.sharer, node.num_shared)
        _release(cache, ended)
        cache.extend(row, len(node.token_ids))

    def _run(self, spans: Sequence[PromptSpan]) -> torch.Tensor:
        """[tokens of the pass, D]"""
        states = self._halves.hidden_states(
            torch.cat([span.token_ids for span in spans]),
            torch.cat([span.positions for span in spans]),
            RaggedPass(spans, self._shapes, self._kernels),
        )
        for span in spans:
            span.mark_written()
        return states

    def _read(
        self,
        states: torch.Tensor,
        spans: Sequence[PromptSpan],
        wants: Sequence[Sequence[_Want]],
        requests: Sequence[ScoreRequest],
        scores: Sequence[TokenScores],
    ) -> None:
        """Runs the head where it is wanted, and fills in what it says."""
        asked: list[_Want] = []
        places: list[npt.NDArray[np.int64]] = []
        first = 0
        for span in spans:
            for want in wants[span.row]:
                start, stop = max(want.start, span.start), min(want.stop, span.stop)
                if start < stop:
                    asked.append(_Want(want.request, start, stop))
                    places.append(np.arange(start, stop) + (first - span.start))
            first += span.num_tokens
        if not asked:
            return
        next_ids = [requests[w.request].token_ids[w.start + 1 : w.stop + 1] for w in asked]
        found = self._look(states, np.concatenate(places), np.concatenate(next_ids), scores[0])
        first = 0
        for want in asked:
            shift = 1 - requests[want.request].num_context
            there = slice(want.start + shift, want.stop + shift)
            here = slice(first, first + want.stop - want.start)
            for whole, part in zip(_arrays(scores[want.request]), _arrays(found), strict=True):
                whole[there] = part[here]
            first = here.stop

    def _look(
        self,
        states: torch.Tensor,
        places: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int64],
        like: TokenScores,
    ) -> TokenScores:
        """Scores a token after each of these places in states, some of which are the same."""
        num_top = like.top_ids.shape[1]
        found = _empty(len(places), num_top)
        places, which = np.unique(places, return_inverse=True)
        chunk = max(1, _LOGITS_BYTES // (4 * self._vocab_size))
        for start in range(0, len(places), chunk):
            taken = torch.from_numpy(places[start : start + chunk]).to(states.device)
            z = self._halves.logits(states[taken]).float()
            mine = np.flatnonzero((start <= which) & (which < start + chunk))
            rows = torch.from_numpy(which[mine] - start).to(z.device)
            ids = torch.from_numpy(token_ids[mine]).to(z.device)
            scores = self._readout.score(z, rows, ids, num_top)
            for whole, part in zip(_arrays(found), _arrays(scores), strict=True):
                whole[mine] = part
        return found


def _release(cache: KVCache, rows: Sequence[int]) -> None:
    for row in set(rows) & set(cache.rows):
        cache.release(row)


def plan_nodes(requests: Sequence[ScoreRequest]) -> tuple[list[_Node], list[list[_Want]]]:
    """What is to be run, in order, and what is asked of each of it."""
    nodes: list[_Node] = []
    wants: list[list[_Want]] = []
    inputs = [request.token_ids[:-1] for request in requests]
    for place in sorted(range(len(inputs)), key=inputs.__getitem__, reverse=True):
        ids = inputs[place]
        common = _count_common(nodes[-1].token_ids, ids) if nodes else 0
        if common < len(ids):
            shared = common // PAGE * PAGE
            nodes.append(_Node(ids, len(nodes) - 1 if shared else None, shared))
            wants.append([])
        node: int | None = len(nodes) - 1
        start, stop = requests[place].num_context - 1, len(ids)
        while node is not None and start < stop:
            own = max(start, nodes[node].num_shared)
            if own < stop:
                wants[node].append(_Want(place, own, stop))
                stop = own
            node = nodes[node].sharer
    return nodes, wants


def _count_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens with which both begin."""
    most = min(len(a), len(b))
    differs = np.flatnonzero(np.array(a[:most]) != np.array(b[:most]))
    return int(differs[0]) if len(differs) else most


def _empty(num_tokens: int, num_top: int) -> TokenScores:
    return TokenScores(
        logprobs=np.empty(num_tokens, np.float32),
        is_best=np.empty(num_tokens, np.bool_),
        top_ids=np.empty((num_tokens, num_top), np.int64),
        top_logprobs=np.empty((num_tokens, num_top), np.float32),
    )


def _arrays(scores: TokenScores) -> tuple[npt.NDArray[np.generic], ...]:
    return scores.logprobs, scores.is_best, scores.top_ids, scores.top_logprobs
