"""The LSTM language model, a baseline of the paper.

Embedding, softmax, dropout and the API are those of :class:`LanguageModel`, with LSTM layers
(Hochreiter and Schmidhuber, 1997) between. The memory of a layer is its state after the last token:
ONE position of a :class:`Memory`, the hidden state concatenated with the cell state.
"""

from contextlib import AbstractContextManager, nullcontext
from itertools import chain, pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from transformer_xl.config import ModelConfig
from transformer_xl.errors import InputError
from transformer_xl.model import LanguageModel, Lengths, Memory, Segment, View
from transformer_xl.ops import emulates


class LSTMModel(LanguageModel):
    """A language model of LSTM layers.

    Backpropagation through time is truncated at segments. The batch is split at every position
    where a document begins in any row (``starts``). ``mem_len`` only sets how many tokens warm up
    the state in a batched evaluation; ``txl recl`` measures the effective context length.

    Only these settings are used: ``n_layer``, ``d_model`` (the width of the states), those of the
    vocabulary, and dropout on the embeddings, between layers and on the output. All others raise.

    Args:
        config: Widths and options. Its ``vocab_size`` must be set.

    Raises:
        SettingsError: The size of the vocabulary is not set, or ``kind`` is that of another class.
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
        with _without_unsupported_autocast(self.device):
            return super()._embedded(segment)

    def require_readable(self, segment: Segment, mems: Memory, lengths: Lengths) -> None:
        """Require a memory of this model, and an ``ext_len`` of 0.

        Raises:
            InputError: Tokens would be read again, or the memory is not one of this model.
        """
        if lengths.ext_len:
            raise InputError(
                f"ext_len={lengths.ext_len}: a model of kind={self.kind!r} cannot take back what "
                "it has read; set it to 0"
            )
        super().require_readable(segment, mems, lengths)

    def _read(
        self, x: Float[Tensor, "B T D"], memory: Memory, view: View
    ) -> tuple[Float[Tensor, "B T D"], Memory]:
        with _without_unsupported_autocast(self.device):
            return self._read_documents(x, memory, view)

    def _read_documents(
        self, x: Float[Tensor, "B T D"], memory: Memory, view: View
    ) -> tuple[Float[Tensor, "B T D"], Memory]:
        T, padding, begins = x.shape[1], view.padding, view.starts
        state, parts = self._state(memory), []
        cuts = [] if begins is None else begins[:, 1:].any(0).nonzero()[:, 0].add(1).tolist()
        for start, stop in pairwise([0, *cuts, T]):
            if begins is not None:
                state = state.where(~begins[:, start, None], 0)
            lengths = None if padding is None else (T - padding).clamp(start, stop) - start
            part, state = self._advance(x[:, start:stop], state, lengths)
            parts.append(part)
        raw = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        states = state.to(self.dtype).detach()[:, :, None]
        return raw.to(self.dtype), Memory(states.unbind())

    def _state(self, mems: Memory) -> Float[Tensor, "N B W"]:
        """Return the state of all layers: zeros for an empty or masked memory."""
        if not len(mems):
            shape = self.config.n_layer, mems.batch_size, self._state_width
            return torch.zeros(shape, device=self.device, dtype=self.dtype)
        state = torch.stack([x[:, -1] for x in mems.states]).to(self.dtype)
        if mems.forgotten is None:
            return state
        return state.where((mems.forgotten < len(mems))[:, None], 0)

    def _advance(
        self,
        x: Float[Tensor, "B T D"],
        state: Float[Tensor, "N B W"],
        lengths: Int[Tensor, " B"] | None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "N B W"]]:
        """Advance the state of all layers over ``x``, or over the first tokens of each row.

        Args:
            x: The input of the first layer.
            state: The state, which is not written to.
            lengths: The number of tokens of each row; 0 keeps its state. None: all.

        Returns:
            The output of the last layer, and the new state.
        """
        before = tuple(part.contiguous() for part in state.chunk(2, -1))
        if lengths is None:
            out, after = self.lstm(x, before)
            return out, torch.cat(after, -1)
        # Packed sequences cannot be empty; the states of empty rows are restored below.
        some = lengths.clamp(min=1).cpu()
        rows = pack_padded_sequence(x, some, batch_first=True, enforce_sorted=False)
        packed, after = self.lstm(rows, before)
        out, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
        return out, torch.where((lengths > 0)[:, None], torch.cat(after, -1), state)

    @property
    def _state_width(self) -> int:
        return 2 * self.config.d_model


def _without_unsupported_autocast(device: torch.device) -> AbstractContextManager:
    """Return a context in float32 if autocast asks for an LSTM that oneDNN does not have.

    With autocast on a CPU, torch computes an LSTM with oneDNN alone, and fails without it.
    """
    if device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        if dtype == torch.float16 or emulates(dtype, "cpu"):
            return torch.autocast("cpu", enabled=False)
    return nullcontext()
