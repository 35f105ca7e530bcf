"""The LSTM language model, a baseline of the paper.

Embedding, softmax, dropout and the API are those of :class:`LanguageModel`, with LSTM layers
(Hochreiter and Schmidhuber, 1997) between. The memory of a layer is its state after the last token:
one position of a :class:`Memory`, the hidden state concatenated with the cell state. So everything
that handles a memory works with LSTMs, too.
"""

from itertools import chain, pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from transformer_xl.config import ModelConfig
from transformer_xl.model.language_model import LanguageModel, Segment
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.memory import Memory


class LSTMModel(LanguageModel):
    """A language model of LSTM layers; backpropagation through time is truncated at segments.

    ``mem_len`` only sets how many tokens warm up the state in a batched evaluation; ``txl recl``
    measures the effective context length. Only these settings are used: ``n_layer``, ``d_model``
    (the width of the states), those of the vocabulary, and dropout on the embeddings, between
    layers (never variational) and on the output. All others are refused.

    The batch is split at every position where a document begins in any row (``starts``).

    Args:
        config: Widths and options. Its ``vocab_size`` must be set.

    Raises:
        ValueError: The size of the vocabulary is not set, or ``kind`` is that of another class.
    """

    kind = "lstm"
    _title = "LSTM"
    remembers_positions = False

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

    def _read(
        self, segment: Segment, mems: Memory | None, lengths: Lengths
    ) -> tuple[Float[Tensor, "B T D"], Memory]:
        if lengths.ext_len:
            raise ValueError(
                f"ext_len={lengths.ext_len}: an LSTM cannot take back what it has read; set it to 0"
            )
        B, T = segment.shape
        if mems is None:
            mems = self.start_memory(B)
        self.require_memory(mems, B)
        x = self._embedded(segment)
        state, parts, begins = self._state(mems), [], segment.starts
        cuts = [] if begins is None else begins[:, 1:].any(0).nonzero()[:, 0].add(1).tolist()
        for start, stop in pairwise([0, *cuts, T]):
            if begins is not None:
                hidden, cell = (y.masked_fill(begins[:, start, None], 0.0) for y in state)
                state = hidden, cell
            real = None
            if segment.short is not None:
                real = (T - segment.short).clamp(start, stop) - start
            part, state = self._through(x[:, start:stop], state, real)
            parts.append(part)
        raw = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        states = torch.cat(state, -1).to(self.dtype).detach()[:, :, None]
        return raw.to(self.dtype), Memory(states.unbind())

    def _through(
        self, x: Float[Tensor, "B T D"], state: tuple[Tensor, Tensor], real: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Advance the state by the first ``real`` tokens of each row."""
        if real is None:
            return self.lstm(x, state)
        # Packed sequences cannot be empty; the states of empty rows are restored below.
        lengths = real.clamp(min=1).cpu()
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        packed, (hidden, cell) = self.lstm(packed, state)
        out, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
        is_read = (real > 0)[:, None]
        hidden, cell = (
            torch.where(is_read, new, old) for new, old in zip((hidden, cell), state, strict=True)
        )
        return out, (hidden, cell)

    def _state(self, mems: Memory) -> tuple[Tensor, Tensor]:
        """Return hidden and cell states; zeros for an empty or masked memory."""
        D = self.config.d_model
        if len(mems):
            states = torch.stack([state[:, -1] for state in mems.states]).to(self.dtype)
        else:
            shape = len(mems.states), mems.batch_size, 2 * D
            states = torch.zeros(shape, device=self.device, dtype=self.dtype)
        if mems.forgotten is not None:
            states = states.masked_fill((mems.forgotten >= len(mems))[:, None], 0.0)
        return states[..., :D].contiguous(), states[..., D:].contiguous()

    @property
    def _state_width(self) -> int:
        return 2 * self.config.d_model
