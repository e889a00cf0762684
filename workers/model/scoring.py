"""Log-probabilities of tokens that are given: a pass over the prompts, and no step after it.

The head runs over a few positions at a time, and over no position that nothing asks for.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from jobs.scoring import ScoreRequest
from workers.model.attention import RaggedPass
from workers.model.halves import Halves
from workers.model.kernels import Kernels
from workers.model.kv_cache import KVCache, PagePool
from workers.model.prefixes import Node, Want, is_alone, plan_nodes
from workers.model.readout import Readout
from workers.model.shape import LayerShape
from workers.model.steps import PromptSpan, cut_passes
from workers.pipeline import TokenScores

_TOKENS_PER_PASS = 2048
"Fewer multiply slower, and a last pass that is half empty costs more; more take memory."
_TOKENS_ALONE = 1024
"A row of more that shares nothing is run by itself: then one layer's keys and values are enough."
_LOGITS_BYTES = 2**25
"Most bytes of logits at a time."

Asked = tuple[Want, npt.NDArray[np.int64]]
"What is asked, and where the states for it stand in a pass."


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
        self._chunk: int = max(1, _LOGITS_BYTES // (4 * self._vocab_size))
        "Places whose logits are made at a time."
        self._shapes = shapes
        self._kernels = kernels
        self._readout = Readout(kernels)
        self._pool = pool
        self._passing_pool = PagePool(model.device, are_passing=True)

    def score(
        self, requests: Sequence[ScoreRequest], num_top: int = 0, keeps_logits: bool = False
    ) -> list[TokenScores]:
        """Scores every request, in order. num_top: K alternatives a token."""
        if not requests:
            return []
        width = self._vocab_size * keeps_logits
        scores = [_empty(len(r.token_ids) - r.num_context, num_top, width) for r in requests]
        nodes, wants = plan_nodes(requests)
        alone = [row for row in range(len(nodes)) if is_alone(nodes, row, _TOKENS_ALONE)]
        with torch.inference_mode():
            for row in alone:
                self._score_alone(nodes[row], wants[row], requests, scores)
            if len(alone) < len(nodes):
                self._score_families(nodes, wants, requests, scores)
        return scores

    def _score_alone(
        self,
        node: Node,
        wants: Sequence[Want],
        requests: Sequence[ScoreRequest],
        scores: Sequence[TokenScores],
    ) -> None:
        """In one pass, so that no layer's keys and values are held beyond the layer."""
        length = len(node.token_ids)
        cache = KVCache(self._passing_pool, [length], num_tokens=length, num_live=1)
        cache.admit(0, length)
        span = PromptSpan(cache, 0, node.token_ids, 0, length)
        self._read(self._run([span]), [span], [wants], requests, scores)

    def _score_families(
        self,
        nodes: Sequence[Node],
        wants: Sequence[Sequence[Want]],
        requests: Sequence[ScoreRequest],
        scores: Sequence[TokenScores],
    ) -> None:
        """All nodes but those that are alone, in passes of about the same size."""
        cache = self._claim(nodes)
        spans = [
            PromptSpan(cache, row, node.token_ids, node.num_shared, len(node.token_ids))
            for row, node in enumerate(nodes)
            if not is_alone(nodes, row, _TOKENS_ALONE)
        ]
        for taken in cut_passes(spans, _TOKENS_PER_PASS):
            for span in taken:
                self._admit(cache, nodes, span.row)
            states = self._run(taken)
            self._read(states, taken, wants, requests, scores)
            _release(cache, cache.rows[:-1])  # The next node may share with the last alone.

    def _claim(self, nodes: Sequence[Node]) -> KVCache:
        """Room for the node before a pass, and for those of one pass, the last of them cut."""
        sizes = [
            0 if is_alone(nodes, row, _TOKENS_ALONE) else len(node.token_ids)
            for row, node in enumerate(nodes)
        ]
        cache = KVCache(
            self._pool,
            sizes,
            num_tokens=2 * max(sizes) + _TOKENS_PER_PASS,
            num_live=min(len(nodes), _TOKENS_PER_PASS) + 1,
        )
        for layer, shape in self._shapes.items():
            cache.pages.allocate(layer, shape)
        return cache

    def _admit(self, cache: KVCache, nodes: Sequence[Node], row: int) -> None:
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
        wants: Sequence[Sequence[Want]],
        requests: Sequence[ScoreRequest],
        scores: Sequence[TokenScores],
    ) -> None:
        """Runs the head where it is wanted, and fills in what it says."""
        asked: list[Asked] = []
        first, keeps_logits = 0, scores[0].logits.shape[1] > 0
        for span in spans:
            for want in wants[span.row]:
                start, stop = max(want.start, span.start), min(want.stop, span.stop)
                # Logits that are kept are not held twice, but for a few at a time.
                size = self._chunk if keeps_logits else max(stop - start, 1)
                for begin in range(start, stop, size):
                    piece = Want(want.request, begin, min(begin + size, stop))
                    here = np.arange(piece.start, piece.stop) + (first - span.start)
                    asked.append((piece, here))
            first += span.num_tokens
        for together in [[one] for one in asked] if keeps_logits else [asked] * bool(asked):
            self._fill(states, together, requests, scores)

    def _fill(
        self,
        states: torch.Tensor,
        asked: Sequence[Asked],
        requests: Sequence[ScoreRequest],
        scores: Sequence[TokenScores],
    ) -> None:
        next_ids = [requests[w.request].token_ids[w.start + 1 : w.stop + 1] for w, _ in asked]
        places = np.concatenate([here for _, here in asked])
        found, first = self._look(states, places, np.concatenate(next_ids), scores[0]), 0
        for want, _ in asked:
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
        num_top, width = like.top_ids.shape[1], like.logits.shape[1]
        found = _empty(len(places), num_top, width)
        places, which = np.unique(places, return_inverse=True)
        for start in range(0, len(places), self._chunk):
            taken = torch.from_numpy(places[start : start + self._chunk]).to(states.device)
            z = self._halves.logits(states[taken]).float()
            mine = np.flatnonzero((start <= which) & (which < start + self._chunk))
            rows = torch.from_numpy(which[mine] - start).to(z.device)
            ids = torch.from_numpy(token_ids[mine]).to(z.device)
            scores = self._readout.score(z, rows, ids, num_top, keeps_logits=width > 0)
            for whole, part in zip(_arrays(found), _arrays(scores), strict=True):
                whole[mine] = part
        return found


def _release(cache: KVCache, rows: Sequence[int]) -> None:
    for row in set(rows) & set(cache.rows):
        cache.release(row)


def _empty(num_tokens: int, num_top: int, width: int) -> TokenScores:
    return TokenScores(
        logprobs=np.empty(num_tokens, np.float32),
        is_best=np.empty(num_tokens, np.bool_),
        top_ids=np.empty((num_tokens, num_top), np.int64),
        top_logprobs=np.empty((num_tokens, num_top), np.float32),
        logits=np.empty((num_tokens, width), np.float32),
    )


def _arrays(scores: TokenScores) -> tuple[npt.NDArray[np.generic], ...]:
    return scores.logprobs, scores.is_best, scores.top_ids, scores.top_logprobs, scores.logits
