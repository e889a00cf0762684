"""A causal language model in two halves: layers to hidden states, and hidden states to logits.

A pass over many tokens wants the logits of all of them a few at a time, since a row of logits is
as long as the vocabulary. T tokens, D channels, V words.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from workers.model.attention import RaggedPass


class Halves:
    """The two halves of one model, which stays as it is."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._body: nn.Module = model.base_model
        "The layers; what the model does after them is the second half."

    def hidden_states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, ragged: RaggedPass
    ) -> torch.Tensor:
        """token_ids and positions [T]. Returns [T, D], after the last norm."""
        output = self._body(
            input_ids=token_ids[None].to(self._model.device),
            position_ids=positions[None].to(self._model.device),
            use_cache=False,
            ragged=ragged,
        )
        self._make_output = type(output)
        states: torch.Tensor = output.last_hidden_state
        return states[0]

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, V] of hidden states [T, D], raw: what the model itself makes of them.

        The model runs as it always does, but for its layers, whose result is known.
        """
        known = self._make_output(last_hidden_state=hidden_states[None])
        self._body.forward = lambda *_, **__: known
        try:
            logits: torch.Tensor = self._model(
                input_ids=hidden_states.new_zeros(1, len(hidden_states), dtype=torch.long),
                use_cache=False,
            ).logits
        finally:
            del self._body.forward  # The class's own is seen again.
        return logits[0]
