"""What rows begin with in common, so that it is run once.

a b c x            Rows are run in the order of their tokens, so that each has before it the
a b c d e f g      one with which it begins longest in common. It reads those tokens' keys and
a b c              values where they are; what is asked of them, their first runner answers.
                   The third runs nothing of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jobs.scoring import ScoreRequest
from workers.model.kv_cache import PAGE


@dataclass(frozen=True, slots=True)
class Node:
    """What is run of a request: its tokens but the last, from where another has not run them."""

    token_ids: tuple[int, ...]
    sharer: int | None
    "The node that has run the first num_shared tokens, or knows who has."
    num_shared: int


@dataclass(frozen=True, slots=True)
class Want:
    """Positions [start, stop) of a node, each to be asked for a request's next token."""

    request: int
    start: int
    stop: int


def plan_nodes(requests: Sequence[ScoreRequest]) -> tuple[list[Node], list[list[Want]]]:
    """What is to be run, in order, and what is asked of each of it."""
    nodes: list[Node] = []
    wants: list[list[Want]] = []
    inputs = [request.token_ids[:-1] for request in requests]
    for place in sorted(range(len(inputs)), key=inputs.__getitem__, reverse=True):
        ids = inputs[place]
        common = _count_common(nodes[-1].token_ids, ids) if nodes else 0
        if common < len(ids):
            shared = common // PAGE * PAGE
            nodes.append(Node(ids, len(nodes) - 1 if shared else None, shared))
            wants.append([])
        node: int | None = len(nodes) - 1
        start, stop = requests[place].num_context - 1, len(ids)
        while node is not None and start < stop:
            own = max(start, nodes[node].num_shared)
            if own < stop:
                wants[node].append(Want(place, own, stop))
                stop = own
            node = nodes[node].sharer
    return nodes, wants


def is_alone(nodes: Sequence[Node], row: int, most: int) -> bool:
    """True for what is longer than most tokens, and begins as nothing else does."""
    is_shared = row + 1 < len(nodes) and nodes[row + 1].sharer == row
    return len(nodes[row].token_ids) > most and nodes[row].sharer is None and not is_shared


def _count_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens with which both begin."""
    most = min(len(a), len(b))
    differs = np.flatnonzero(np.array(a[:most]) != np.array(b[:most]))
    return int(differs[0]) if len(differs) else most
