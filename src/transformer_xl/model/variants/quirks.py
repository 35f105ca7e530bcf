"""Deviations of the authors' code from the paper, for checkpoints that depend on them."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from transformer_xl.model.layer import DecoderLayer
from transformer_xl.model.memory import Memory
from transformer_xl.model.positions import LayerPositions
from transformer_xl.model.segment import View


class RawQueryLayer(DecoderLayer):
    """A pre-norm layer whose queries are projected from inputs that are not normalized."""

    def project(
        self, x: Float[Tensor, "B T D"], past: Float[Tensor, "B M D"]
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]]:
        """See :meth:`DecoderLayer.project`."""
        _, k, v = super().project(x, past)
        return self.attention.queries(x), k, v


class AuthorsMemory:
    """What the authors' code remembers of a segment.

    Args:
        stores: The quirk ``stored_positions``.
        swaps: The quirk ``swapped_ext_len``.
    """

    def __init__(self, *, stores: bool, swaps: bool) -> None:
        self._stores, self._swaps = stores, swaps

    def __call__(
        self,
        memory: Memory,
        states: Sequence[Float[Tensor, "B T D"]],
        positions: Sequence[LayerPositions],
        view: View,
    ) -> Memory:
        """Return the memory after the segment."""
        M, T = memory.length, states[0].shape[1]
        if self._stores:
            pasts = zip(positions, memory.states, states, strict=True)
            placed = [position.placed(past, x) for position, past, x in pasts]
            memory = Memory([past.detach() for past, _ in placed], memory.forgotten)
            states = [x for _, x in placed]
        if self._swaps:
            view = view._replace(ext_len=min(M, view.ext_len, T))
        return view.remember(memory, states)
