"""The paper's components. A variant replaces one of them."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.model.memory import Memory
from transformer_xl.model.positions import LayerPositions
from transformer_xl.model.segment import View

if TYPE_CHECKING:
    from transformer_xl.model.transformer_xl import TransformerXL

LayerInput = Callable[[int, Tensor], Tensor]
"""Returns the input of layer n, counted from 0, given the output of the layer before."""


class Residuals:
    """Residual connections from the input of the first layer to the other layers: none."""

    def add_parameters(self, model: "TransformerXL") -> None:
        """Register parameters on the model, under the names that they have in files."""

    def __call__(self, model: "TransformerXL", x: Float[Tensor, "B T D"]) -> LayerInput:
        """Return what makes the inputs of the layers, given that of the first one."""
        return lambda n, output: output


class InputStage:
    """What happens to embeddings before the first layer: nothing."""

    def add_parameters(self, model: "TransformerXL") -> None:
        """Register parameters on the model, under the names that they have in files."""

    def __call__(
        self, model: "TransformerXL", x: Float[Tensor, "B T D"], memory: Memory, view: View
    ) -> Float[Tensor, "B T D"]:
        """Return the input of the first layer."""
        return x


Seen = Iterable[tuple[Tensor, LayerPositions, View]]
"""For each layer, what it reads of the memory, its positions, and its view."""


def whole_memory(
    pasts: Sequence[Float[Tensor, "B M D"]], positions: Sequence[LayerPositions], view: View
) -> Seen:
    """Return what layers see: all of the memory."""
    return zip(pasts, positions, [view] * len(pasts), strict=True)


class PlainSoftmax(nn.Module):
    """The softmax of the paper: queries are as they are."""

    growth, n_keys = None, 0

    def forward(
        self, q: Float[Tensor, "B T H K"], n_keys: int, view: View
    ) -> Float[Tensor, "B T H K"]:
        """Return the queries."""
        return q

    def scaled(
        self, q: Float[Tensor, "B T H K"], n_seen: Int[Tensor, "B T"]
    ) -> Float[Tensor, "B T H K"]:
        """Return the queries."""
        return q


def own_keys(k: Float[Tensor, "B S H K"], view: View) -> Float[Tensor, "B S H K"]:
    """Return the keys as they were projected, each from its own position."""
    return k


def keep_input(
    layer: nn.Module, x: Float[Tensor, "B T D"], y: Float[Tensor, "B T D"], view: View
) -> Float[Tensor, "B T D"]:
    """Return what the memory keeps of a segment: the input x of the layer (section 3.2)."""
    return x


def remember(
    memory: Memory,
    states: Sequence[Float[Tensor, "B T D"]],
    positions: Sequence[LayerPositions],
    view: View,
) -> Memory:
    """Return the memory after a segment, given what layers keep of it."""
    return view.remember(memory, states)


class PostNorm:
    """The sum of input and output of a block is normalized (Vaswani et al., 2017).

    ``gate`` is None: only the residuals of GTrXL have one (``variants/gates.py``).
    """

    def before(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Return what the block reads, given the input."""
        return x

    def after(self, norm: nn.Module, gate: nn.Module | None, x: Tensor, y: Tensor) -> Tensor:
        """Return the output, given the input x and what the block computed, y."""
        return norm(x + y)


class PreNorm:
    """The input of a block is normalized, and the output added to it."""

    def before(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Return what the block reads, given the input."""
        return norm(x)

    def after(self, norm: nn.Module, gate: nn.Module | None, x: Tensor, y: Tensor) -> Tensor:
        """Return the output, given the input x and what the block computed, y."""
        return x + y
