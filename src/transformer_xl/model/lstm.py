"""The LSTM language model, a baseline of the paper.

Embedding, softmax, dropout and the API are those of :class:`LanguageModel`, with LSTM layers
(Hochreiter and Schmidhuber, 1997) between. The state of a layer in the memory is the hidden state
concatenated with the cell state.
"""

from itertools import chain

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from transformer_xl.config import ModelConfig
from transformer_xl.model.recurrent import RecurrentModel


class LSTMModel(RecurrentModel):
    """A language model of LSTM layers.

    Only these settings are used: ``n_layer``, ``d_model``
    (the width of the states), those of the vocabulary, and dropout on the embeddings, between
    layers (never variational) and on the output. All others are refused.

    Args:
        config: Widths and options. Its ``vocab_size`` must be set.

    Raises:
        ValueError: The size of the vocabulary is not set, or ``kind`` is that of another class.
    """

    kind = "lstm"
    _title = "LSTM"

    def _build(self, config: ModelConfig) -> None:
        D, N = config.d_model, config.n_layer
        # With one layer, torch warns that dropout has no effect.
        between = config.dropout if N > 1 else 0.0
        self.lstm = nn.LSTM(D, D, N, batch_first=True, dropout=between)

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
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                is_projection = "proj" in name
                std = self.config.proj_init_std if is_projection else self.config.init_std
                parameter.normal_(0.0, std)

    @property
    def _weight(self) -> Tensor:
        # Quantized layers may have no parameters of torch.
        return next(chain(self.lstm.parameters(), self.parameters()))

    def _advance(
        self, x: Float[Tensor, "B T D"], state: Float[Tensor, "N B W"]
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "N B W"]]:
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
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        packed, after = self.lstm(packed, self._hidden_and_cell(state))
        out, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
        return out, torch.where((real > 0)[:, None], torch.cat(after, -1), state)

    def _hidden_and_cell(self, state: Float[Tensor, "N B W"]) -> tuple[Tensor, Tensor]:
        hidden, cell = state.chunk(2, -1)
        return hidden.contiguous(), cell.contiguous()

    @property
    def _state_width(self) -> int:
        return 2 * self.config.d_model
