"""What layers compute on the way: their hidden states and attention weights, with gradients."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from transformer_xl.model.layer import Attention, DecoderLayer


class Observed:
    """What the layers of a model computed, call by call.

    Attributes:
        hidden: The input of the first layer, then the output of each layer, (B, T, D).
        weights: The attention weights of each layer, (B, H, T, visible).
    """

    def __init__(self) -> None:
        self.hidden: list[Float[Tensor, "B T D"]] = []
        self.weights: list[Float[Tensor, "B H T visible"]] = []

    @property
    def attentions(self) -> list[Float[Tensor, "B H T S"]]:
        """Attention weights of each layer, of the positions of the memory, then of the segment."""
        missing = [max(y.shape[-1] for y in self.weights) - x.shape[-1] for x in self.weights]
        # Layers do not compute what is out of their reach. Padding copies, and a copy is not what
        # the output was computed from: it has no gradient.
        return [F.pad(x, (n, 0)) if n else x for x, n in zip(self.weights, missing, strict=True)]


@contextmanager
def observed(layers: Iterable[DecoderLayer], *, attentions: bool = False) -> Iterator[Observed]:
    """Record what layers compute in a ``with`` block, in this thread.

    Args:
        layers: The layers of a model, in order.
        attentions: Also record attention weights. Attention is then computed by the reference, so
            that gradients flow through the weights: slower, and equal up to rounding.
    """
    record, thread = Observed(), get_ident()

    # Another thread may be reading with the same model.
    def remember(layer: nn.Module, inputs: tuple, out: Tensor) -> None:
        if get_ident() == thread:
            record.hidden += [out] if record.hidden else [inputs[0], out]

    def attend(attention: Attention, inputs: tuple, out: Tensor) -> Tensor:
        if get_ident() != thread:
            return out
        attended, weights = attention.attended_with_weights(*inputs)
        record.weights.append(weights)
        return attended

    hooks = [layer.register_forward_hook(remember) for layer in layers]
    if attentions:
        hooks += [layer.attention.register_forward_hook(attend) for layer in layers]
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()
