"""The LSTM language model, a baseline of the paper.

Embedding, softmax, dropout and the API are those of :class:`LanguageModel`, with LSTM layers
(Hochreiter and Schmidhuber, 1997) between. The state of a layer in the memory is the hidden state
concatenated with the cell state.

With ``weight_dropout`` and ``variational_dropout`` it is trained as an AWD-LSTM (Merity et al.,
arXiv 1708.02182); ``embed_dropout``, ``train.activation_reg``,
``train.temporal_activation_reg`` and ``train.random_segment_len`` belong to it, too.
"""

from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from transformer_xl.config import ModelConfig
from transformer_xl.model import Memory, Segment, View
from transformer_xl.ops import dropout, emulates
from transformer_xl.studies.models.recurrent import RecurrentModel


class LSTMModel(RecurrentModel):
    """A language model of LSTM layers.

    Only these settings are used: ``n_layer``, ``d_model`` (the width of the states), those of the
    vocabulary, and dropout on the embeddings, between layers, on the output and on the
    hidden-to-hidden weights. All others are refused.

    Args:
        config: Widths and options. Its ``vocab_size`` must be set.

    Raises:
        SettingsError: The size of the vocabulary is not set, or ``kind`` is that of another class.
    """

    kind = "lstm"
    _title = "LSTM"

    def _build(self, config: ModelConfig) -> None:
        D, N = config.d_model, config.n_layer
        # With one layer, torch warns that dropout has no effect.
        between = config.dropout if N > 1 else 0.0
        self.lstm = nn.LSTM(D, D, N, batch_first=True, dropout=between)
        self._drawn: _Drawn | None = None

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw the initial weights.

        Those of the LSTM are uniform within 1 / sqrt(D), as in PyTorch, with a forget gate bias of
        1 (Jozefowicz et al., 2015). The others are normal, as in the authors' code.
        """
        D = self.config.d_model
        for name, parameter in self.named_parameters():
            if name.startswith("lstm."):
                parameter.uniform_(-(D**-0.5), D**-0.5)
                # The gates are in the order input, forget, cell, output.
                if name.startswith("lstm.bias_ih"):
                    parameter[D : 2 * D] = 1.0
                elif name.startswith("lstm.bias_hh"):
                    parameter[D : 2 * D] = 0.0
            elif name.endswith("bias") and name != "embedding.bias":
                parameter.zero_()
            else:
                is_projection = "proj" in name
                std = self.config.proj_init_std if is_projection else self.config.init_std
                parameter.normal_(0.0, std)

    @property
    def _weight(self) -> Tensor:
        # Quantized layers may have no parameters of torch.
        return next(chain(self.lstm.parameters(), self.parameters()))

    def _embedded(self, segment: Segment) -> Float[Tensor, "B T D"]:
        config, (B, _) = self.config, segment.shape
        is_masked = config.variational_dropout and config.dropout and config.n_layer > 1
        is_drawn = self.training and (config.weight_dropout or is_masked)
        self._drawn = self._draw(B) if is_drawn else None
        with _without_unsupported_autocast(self.device):
            return super()._embedded(segment)

    def _read(
        self, x: Float[Tensor, "B T D"], memory: Memory, view: View
    ) -> tuple[Float[Tensor, "B T D"], Memory]:
        try:
            with _without_unsupported_autocast(self.device):
                return super()._read(x, memory, view)
        finally:
            self._drawn = None

    def _draw(self, B: int) -> "_Drawn":
        """Draw the dropout of a segment."""
        N, ones = self.config.n_layer, self._weight.new_ones(B, 1, self.config.d_model)
        weights = [self.lstm.get_parameter(f"weight_hh_l{n}") for n in range(N)]
        p = self.config.dropout
        is_locked = self.config.variational_dropout
        return _Drawn(
            [dropout(weight, self.config.weight_dropout, True) for weight in weights],
            [dropout(ones, p, True) for _ in range(N - 1)] if is_locked and p else None,
        )

    def _advance(
        self, x: Float[Tensor, "B T D"], state: Float[Tensor, "N B W"]
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "N B W"]]:
        if self._drawn is not None:
            return self._advance_dropped(self._drawn, x, state, None)
        out, after = self.lstm(x, self._hidden_and_cell(state))
        return out, torch.cat(after, -1)

    def _advance_padded(
        self,
        x: Float[Tensor, "B T D"],
        state: Float[Tensor, "N B W"],
        real: Int[Tensor, " B"],
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "N B W"]]:
        # Packed sequences cannot be empty; the states of empty rows are restored below.
        lengths = real.clamp(min=1).cpu()
        if self._drawn is not None:
            out, after = self._advance_dropped(self._drawn, x, state, lengths)
        else:
            packed, after = self.lstm(_packed(x, lengths), self._hidden_and_cell(state))
            out, after = _padded(packed, x.shape[1]), torch.cat(after, -1)
        return out, torch.where((real > 0)[:, None], after, state)

    def _advance_dropped(
        self,
        drawn: "_Drawn",
        x: Float[Tensor, "B T D"],
        state: Float[Tensor, "N B W"],
        lengths: Int[Tensor, " B"] | None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "N B W"]]:
        """Advance the state layer by layer, with the dropout of this segment."""
        # Its stubs lack the overloads.
        lstm: Any = torch.lstm
        states = []
        for n, (weight, old) in enumerate(zip(drawn.weights, state, strict=True)):
            if n and drawn.masks is not None:
                x = x * drawn.masks[n - 1]
            elif n:
                x = dropout(x, self.config.dropout, True)
            names = f"weight_ih_l{n}", f"bias_ih_l{n}", f"bias_hh_l{n}"
            inward, *biases = (self.lstm.get_parameter(name) for name in names)
            # With biases, one layer, no dropout of its own, training, one direction.
            options = [inward, weight, *biases], True, 1, 0.0, True, False
            before = self._hidden_and_cell(old[None])
            if lengths is None:
                x, *after = lstm(x, before, *options, True)
            else:
                packed = _packed(x, lengths)
                order, back = packed.sorted_indices, packed.unsorted_indices
                before = tuple(y[:, order] for y in before)
                data, *after = lstm(packed.data, packed.batch_sizes, before, *options)
                x = _padded(packed._replace(data=data), x.shape[1])
                after = [y[:, back] for y in after]
            states.append(torch.cat(after, -1))
        return x, torch.cat(states)

    def _hidden_and_cell(self, state: Float[Tensor, "N B W"]) -> tuple[Tensor, Tensor]:
        hidden, cell = state.chunk(2, -1)
        return hidden.contiguous(), cell.contiguous()

    @property
    def _state_width(self) -> int:
        return 2 * self.config.d_model


class _Drawn(NamedTuple):
    """The dropout of a segment."""

    weights: list[Float[Tensor, "gates D"]]
    """The hidden-to-hidden weights of each layer."""
    masks: list[Float[Tensor, "B 1 D"]] | None
    """The factor of the input of each layer but the first. None: drawn for each position."""


def _without_unsupported_autocast(device: torch.device) -> AbstractContextManager:
    """Return a context in float32 if autocast asks for an LSTM that oneDNN does not have.

    With autocast on a CPU, torch computes an LSTM with oneDNN alone, and fails without it.
    """
    if device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        if dtype == torch.float16 or emulates(dtype, "cpu"):
            return torch.autocast("cpu", enabled=False)
    return nullcontext()


def _packed(x: Float[Tensor, "B T D"], lengths: Int[Tensor, " B"]) -> PackedSequence:
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


def _padded(packed: PackedSequence, T: int) -> Float[Tensor, "B T D"]:
    return pad_packed_sequence(packed, batch_first=True, total_length=T)[0]
