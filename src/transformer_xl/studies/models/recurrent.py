"""What models with a recurrent state share: their memory, documents and padding.

The memory of a layer is its state after the last token: ONE position of a :class:`Memory`, with all
tensors of the state flattened into a vector. So everything that handles a memory works with these
models, too.
"""

from abc import abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_xl.errors import InputError
from transformer_xl.model import LanguageModel, Lengths, Memory, Segment, View


def refuse_ext_len(kind: str, lengths: Lengths) -> None:
    """Refuse an extended context.

    Raises:
        InputError: There is one.
    """
    if lengths.ext_len:
        raise InputError(
            f"ext_len={lengths.ext_len}: a model of kind={kind!r} cannot take back what it has "
            "read; set it to 0"
        )


def pieces(view: View, T: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of the parts of a segment between which documents begin, in any row."""
    starts = view.starts
    cuts = [] if starts is None else starts[:, 1:].any(0).nonzero()[:, 0].add(1).tolist()
    return pairwise([0, *cuts, T])


class RecurrentModel(LanguageModel):
    """A language model that reads token after token with a state of fixed size.

    Backpropagation through time is truncated at segments. The batch is split at every position
    where a document begins in any row (``starts``). ``mem_len`` only sets how many tokens warm up
    the state in a batched evaluation; ``txl recl`` measures the effective context length.

    A subclass implements :meth:`_advance` and ``_state_width``, and :meth:`_initial_state` unless
    its texts begin with zeros.
    """

    remembers_positions = False

    @abstractmethod
    def _advance(
        self, x: Float[Tensor, "B T D"], state: Float[Tensor, "N B W"]
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "N B W"]]:
        """Advance the state of all layers over ``x``; return their output and the new state.

        The given state must not be written to.
        """

    def _advance_padded(
        self,
        x: Float[Tensor, "B T D"],
        state: Float[Tensor, "N B W"],
        real: Int[Tensor, " B"],
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "N B W"]]:
        """Advance the state by the first ``real`` tokens of each row; 0 keeps it.

        Rows of equal length are advanced together.
        """
        out, states = torch.zeros_like(x), state
        for n in real.unique().tolist():
            if n:
                rows = (real == n).nonzero()[:, 0]
                part, after = self._advance(x[rows, :n], state[:, rows])
                index = rows[:, None], torch.arange(n, device=x.device)
                out = out.index_put(index, part.to(out.dtype))
                states = states.index_copy(1, rows, after.to(states.dtype))
        return out, states

    def _initial_state(self) -> Float[Tensor, "N 1 W"]:
        """Return the state at the start of a text."""
        shape = self.config.n_layer, 1, self._state_width
        return torch.zeros(shape, device=self.device, dtype=self._state_dtype)

    @property
    def _state_dtype(self) -> torch.dtype:
        """Precision of the state."""
        return self.dtype

    def require_readable(self, segment: Segment, mems: Any, lengths: Lengths) -> None:
        """Require a memory of this model, and no extended context."""
        refuse_ext_len(self.kind, lengths)
        super().require_readable(segment, mems, lengths)

    def _read(
        self, x: Float[Tensor, "B T D"], memory: Memory, view: View
    ) -> tuple[Float[Tensor, "B T D"], Memory]:
        T, padding, begins = x.shape[1], view.padding, view.starts
        initial, state = self._initial_state(), self._state(memory)
        parts = []
        for start, stop in pieces(view, T):
            if begins is not None:
                state = torch.where(begins[:, start, None], initial, state)
            part = x[:, start:stop]
            if padding is None:
                part, state = self._advance(part, state)
            else:
                real = (T - padding).clamp(start, stop) - start
                part, state = self._advance_padded(part, state, real)
            parts.append(part)
        raw = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        states = state.to(self._state_dtype).detach()[:, :, None]
        return raw.to(self.dtype), Memory(states.unbind())

    def _state(self, mems: Memory) -> Float[Tensor, "N B W"]:
        """Return the state of all layers; the initial one for an empty or masked memory."""
        initial = self._initial_state()
        if not len(mems):
            return initial.expand(-1, mems.batch_size, -1)
        state = torch.stack([x[:, -1] for x in mems.states]).to(self._state_dtype)
        if mems.forgotten is None:
            return state
        return torch.where((mems.forgotten >= len(mems))[:, None], initial, state)
