"""What is read off rows of logits: the best, the mass, and the top. n rows, V words, K of them."""

import torch

from workers.model.kernels import Kernels
from workers.pipeline import TokenScores

_SHORT_LIST = 64
"Alternatives up to so many are found by going through the logits once."


class Readout:
    """Reads with the compiled kernels, or with PyTorch alone."""

    def __init__(self, kernels: Kernels | None) -> None:
        self._kernels = kernels

    def find_best(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best of each row of z [n, V], NaN if one is no number, and the lowest id with it."""
        if self._kernels is None:
            return z.max(dim=1)  # Of equal logits, max takes the first.
        return self._kernels.find_best(z.contiguous())

    def log_mass(self, z: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """[n], logsumexp of z - best, in nats.

        A log-probability is the logit minus logsumexp: float32 log_softmax is off by 2e-5 on a CPU.
        The best logit is taken off both first, so that large logits do not use up the digits.
        """
        if self._kernels is None:
            return torch.logsumexp(z - best[:, None], dim=1)
        return self._kernels.log_mass(z.contiguous(), best)

    def find_top(self, z: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The highest values of each row and their ids [n, K], of equals the lowest id first."""
        if self._kernels is None or count > _SHORT_LIST:
            return best_sorted(z, count)
        return self._kernels.find_top(z.contiguous(), count)

    def score(
        self,
        z: torch.Tensor,
        rows: torch.Tensor,
        token_ids: torch.Tensor,
        num_top: int,
        *,
        keeps_logits: bool,
    ) -> TokenScores:
        """Of tokens [T], each in the row of z [n, V] that rows [T] names; with alternatives."""
        best, best_ids = self.find_best(z)
        mass = self.log_mass(z, best)
        chosen = (z[rows, token_ids] - best[rows]) - mass[rows]
        top, top_ids = (
            self.find_top(z, num_top) if num_top else (z[:, :0], best_ids[:, None][:, :0])
        )
        top = (top - best[:, None]) - mass[:, None]
        return TokenScores(
            logprobs=chosen.cpu().numpy(),
            is_best=((best_ids[rows] == token_ids) & ~chosen.isnan()).cpu().numpy(),
            top_ids=top_ids[rows].cpu().numpy(),
            top_logprobs=top[rows].cpu().numpy(),
            logits=z[rows, : z.shape[1] * keeps_logits].cpu().numpy(),
        )


def best_sorted(z: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest count values of each row and their ids, both [n, count].

    Highest first; of equal values the lower id comes first, and is the one that is kept at the end
    of the list. topk alone promises neither.
    """
    if 2 * count >= z.shape[1]:
        values, ids = z.sort(dim=1, descending=True, stable=True)
        return values[:, :count], ids[:, :count]
    values, ids = z.topk(count + 1, dim=1)
    is_equal = values[:, 1:] == values[:, :-1]
    if is_equal.any():
        ids, order = ids.sort(dim=1)
        values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
        ids = ids.gather(1, order)
        is_cut = values[:, count - 1] == values[:, count]  # Equal values on both sides of the end.
        if is_cut.any():
            whole, whole_ids = z[is_cut].sort(dim=1, descending=True, stable=True)
            values[is_cut], ids[is_cut] = whole[:, : count + 1], whole_ids[:, : count + 1]
    return values[:, :count], ids[:, :count]
