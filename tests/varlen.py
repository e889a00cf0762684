"""What torch.nn.attention.varlen documents, in plain PyTorch: its kernels run on a GPU alone."""

from collections.abc import Callable

import torch


def plain_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """As of PyTorch 2.11: as many heads of keys as of queries."""
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert len(cu_seq_q) == len(cu_seq_k)
    query_sizes, key_sizes = cu_seq_q.diff(), cu_seq_k.diff()
    assert cu_seq_q[0] == cu_seq_k[0] == 0
    assert query_sizes.min() >= 0 and key_sizes.min() >= 0
    assert cu_seq_q[-1] == len(query) and cu_seq_k[-1] <= len(key)
    assert query_sizes.max() <= max_q
    assert key_sizes[query_sizes > 0].max() <= max_k
    output = torch.full_like(query, torch.nan)
    for row in range(len(query_sizes)):
        queries = slice(int(cu_seq_q[row]), int(cu_seq_q[row + 1]))
        keys = slice(int(cu_seq_k[row]), int(cu_seq_k[row + 1]))
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        if not num_queries:
            continue
        scores = torch.einsum("qhd,khd->hqk", query[queries], key[keys]) * scale
        ages = torch.arange(num_queries)[:, None] + num_keys - num_queries - torch.arange(num_keys)
        left, right = window_size
        is_hidden = torch.zeros_like(ages, dtype=torch.bool)
        if left >= 0:
            is_hidden |= ages > left
        if right >= 0:
            is_hidden |= -ages > right
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(dim=-1)
        output[queries] = torch.einsum("hqk,khd->qhd", weights, value[keys])
    return output


def grouped_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *bounds: torch.Tensor,
    enable_gqa: bool = False,
    **sight: object,
) -> torch.Tensor:
    """As of PyTorch 2.13: key-value heads may serve several query heads."""
    num_groups = query.shape[1] // key.shape[1]
    assert enable_gqa or num_groups == 1
    key, value = (x.repeat_interleave(num_groups, dim=1) for x in (key, value))
    return plain_varlen(query, key, value, *bounds, **sight)


def replay_by_running(launch: Callable[[], None]) -> Callable[[], None]:
    """In the place of a captured graph: does the same again, from and to the same tensors."""
    launch()
    return launch
