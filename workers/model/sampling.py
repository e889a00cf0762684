"""From logits to tokens: penalties, masks, filters, one drawn number a row, and log-probabilities.

B rows in a batch, n of them in this step, W candidates looked at, K alternatives, V words.

The order of steps, the generator and the arithmetic of the draw are those of Modular MAX 26.7 on a
CPU, so that the same seed draws the same tokens.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from jobs.completion import Capture
from jobs.sampling import MASK_64
from workers.model.filters import Filters, FloatRows
from workers.model.kernels import Kernels
from workers.model.penalties import Penalties
from workers.model.philox import uniform
from workers.model.readout import Readout, best_sorted
from workers.pipeline import RowContext, StepOutput


class Sampler:
    """Draws the tokens of a batch. Rows share nothing: neighbours never change a row's tokens."""

    def __init__(
        self,
        contexts: Sequence[RowContext],
        capture: Capture,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        device: torch.device,
        kernels: Kernels | None = None,
    ) -> None:
        """kernels: looks through the logits; None does it with PyTorch alone."""
        samplings = [context.sampling for context in contexts]
        self._capture = capture
        self._readout = Readout(kernels)
        self._seeds = np.array([context.seed & MASK_64 for context in contexts], np.uint64)
        self._num_tokens = np.array([len(context.token_ids) for context in contexts], np.uint64)
        self._num_new = np.zeros(len(contexts), np.int64)
        self._min_new = np.array([s.min_new_tokens for s in samplings], np.int64)
        self._ending_ids = [sorted(eos_token_ids | s.stop_token_ids) for s in samplings]
        self._is_greedy = np.array([s.is_greedy for s in samplings], np.bool_)
        self._filters = Filters(samplings, vocab_size)
        self._takes_best = capture == Capture() and all(
            s.is_greedy and not s.has_penalties for s in samplings
        )
        self._penalties = (
            Penalties(contexts, vocab_size, device)
            if any(s.has_penalties for s in samplings)
            else None
        )

    def draw(
        self, raw: torch.Tensor, rows: npt.NDArray[np.int64], best_ids: torch.Tensor | None = None
    ) -> StepOutput:
        """Draws a token for each row of raw, the model's logits [n, V].

        best_ids: the best id of each row [n], -1 where the logits are no numbers, if it is known.
        """
        if best_ids is not None and self._takes_best and not self._is_young(rows).any():
            return self._take(best_ids, rows)
        raw = raw.float()
        z = raw if self._penalties is None else self._penalties.apply(raw, rows)
        z = self._mask_endings(z, rows)
        peak, best = self._readout.find_best(z)
        has_nan = ~torch.isfinite(peak)
        if has_nan.any():  # Such a row is lost; its numbers must not stop the others.
            z = torch.where(has_nan[:, None], torch.zeros_like(z), z)
            peak, best = self._readout.find_best(z)
        token_ids: npt.NDArray[np.int64] = best.cpu().numpy()
        drawn = np.flatnonzero(~self._is_greedy[rows])
        if len(drawn):
            token_ids[drawn] = self._draw(z, peak, rows, drawn)
        self._num_tokens[rows] += np.uint64(1)
        self._num_new[rows] += 1
        if self._penalties is not None:
            self._penalties.count(rows, token_ids)
        logprobs, top_ids, top_logprobs = self._log_probs(z, peak, token_ids)
        return StepOutput(
            rows=rows,
            token_ids=token_ids,
            has_nan=has_nan.cpu().numpy(),
            logprobs=logprobs,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            logits=raw.cpu().numpy() if self._capture.logits else None,
        )

    def _take(self, best_ids: torch.Tensor, rows: npt.NDArray[np.int64]) -> StepOutput:
        """The tokens where nothing but the best is asked for: one read, no look at the logits."""
        token_ids: npt.NDArray[np.int64] = best_ids.cpu().numpy()
        has_nan = token_ids < 0
        self._num_tokens[rows] += np.uint64(1)
        self._num_new[rows] += 1
        return StepOutput(rows=rows, token_ids=token_ids.clip(0), has_nan=has_nan)

    def _is_young(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which rows have not yet the length asked for, so that nothing may end them."""
        return self._num_new[rows] < self._min_new[rows]

    def _mask_endings(self, z: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """Forbids what would end a row that has not yet the length asked for."""
        young = np.flatnonzero(self._is_young(rows))
        if not len(young):
            return z
        z = z.clone()
        for place in young.tolist():
            z[place, self._ending_ids[rows[place]]] = -torch.inf
        return z

    def _log_probs(
        self, z: torch.Tensor, peak: torch.Tensor, token_ids: npt.NDArray[np.int64]
    ) -> tuple[FloatRows | None, npt.NDArray[np.int64] | None, FloatRows | None]:
        count = self._capture.logprobs
        if count is None:
            return None, None, None
        chosen = z.gather(1, torch.from_numpy(token_ids).to(z.device)[:, None])[:, 0] - peak
        mass = self._readout.log_mass(z, peak)
        logprobs: FloatRows = (chosen - mass).cpu().numpy()
        if not count:
            return logprobs, None, None
        top, top_ids = self._readout.find_top(z, count)
        top_logprobs: FloatRows = ((top - peak[:, None]) - mass[:, None]).cpu().numpy()
        return logprobs, top_ids.cpu().numpy(), top_logprobs

    def _draw(
        self,
        z: torch.Tensor,
        peak: torch.Tensor,
        rows: npt.NDArray[np.int64],
        drawn: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """Token ids for the places in drawn, whose rows are not greedy."""
        if len(drawn) < len(rows):
            places = torch.from_numpy(drawn).to(z.device)
            z, peak, rows = z[places], peak[places], rows[drawn]
        filters = self._filters
        temperature = torch.from_numpy(filters.temperature[rows]).to(z.device)[:, None]
        numbers = uniform(self._seeds[rows] + self._num_tokens[rows])
        mass = np.zeros(len(rows), np.float32)
        if filters.is_open[rows].any():  # float64: the sum must not depend on how it is grouped.
            weights = ((z - peak[:, None]) / temperature).exp_()
            mass = weights.sum(dim=1, dtype=torch.float64).float().cpu().numpy()

        token_ids = np.zeros(len(rows), np.int64)
        todo = np.arange(len(rows))
        width = filters.first_width(rows)
        while len(todo):
            places = torch.from_numpy(todo).to(z.device)
            candidates, ids = best_sorted(z[places], width)
            weights = ((candidates - peak[places, None]) / temperature[places]).exp_()
            choice, is_settled = filters.walk(
                weights.cpu().numpy(), rows[todo], mass[todo], numbers[todo]
            )
            token_ids[todo] = ids.cpu().numpy()[np.arange(len(todo)), choice]
            todo, width = todo[~is_settled], z.shape[1]
        return token_ids
