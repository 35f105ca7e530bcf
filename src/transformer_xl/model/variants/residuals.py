"""Residual connections of all layers to the first one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from transformer_xl.model.parts import FirstLayer, Residuals, unmixed

if TYPE_CHECKING:
    from transformer_xl.model.transformer_xl import TransformerXL


class FirstLayerResiduals(Residuals):
    r"""Learned mixes of what each layer reads and projects with that of the first layer.

    With ``value_residual`` (ResFormer; Zhou et al., 2024, arXiv 2410.17897, its learned form), the
    values of layer n > 1 are, for memory and segment alike,

    $$V^n = \lambda^n_1 h^{n-1} W_v^n + \lambda^n_2 h^0 W_v^1$$

    With ``embedding_residual``, its input is, with the output $\hat h^{n-1}$ of the layer before,

    $$h^{n-1} = \mu^n_1 \hat h^{n-1} + \mu^n_2 \mathrm{RMSNorm}(h^0)$$
    """

    def add_parameters(self, model: "TransformerXL") -> None:
        """Register the factors of all layers but the first."""
        n_others = model.config.n_layer - 1
        if model.config.value_residual:
            model.value_own = nn.Parameter(torch.empty(n_others))
            model.value_first = nn.Parameter(torch.empty(n_others))
        if model.config.embedding_residual:
            model.embedding_own = nn.Parameter(torch.empty(n_others))
            model.embedding_first = nn.Parameter(torch.empty(n_others))

    def __call__(self, model: "TransformerXL") -> FirstLayer:
        """Return the mixes of one forward pass."""
        inputs = values = unmixed
        if model.embedding_own is not None and model.embedding_first is not None:
            normalized = partial(_normalized, eps=model.config.norm_eps)
            inputs = _Mix(model.embedding_own, model.embedding_first, normalized)
        if model.value_own is not None and model.value_first is not None:
            values = _Mix(model.value_own, model.value_first)
        return FirstLayer(inputs, values)


class _Mix:
    """Remembers the tensor of the first layer, and mixes it into those of the others."""

    def __init__(
        self,
        factors: Float[Tensor, " others"],
        first: Float[Tensor, " others"],
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._own, self._first, self._change = factors, first, change
        self._of_first: Tensor

    def __call__(self, layer: int, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        if layer == 0:
            self._of_first = x if self._change is None else self._change(x)
            return x
        # The precision of autocast, which the factors do not have.
        factor, first = (factors[layer - 1].to(x.dtype) for factors in (self._own, self._first))
        return x * factor + self._of_first * first


def _normalized(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=eps)


def factors(
    of_layer: Tensor | None, first: Tensor | None, n_layer: int
) -> Sequence[tuple[float, float]]:
    """Return both factors of each layer as numbers; 1 and 0 where nothing is mixed."""
    if of_layer is None or first is None:
        return [(1.0, 0.0)] * n_layer
    return [(1.0, 0.0), *zip(of_layer.tolist(), first.tolist(), strict=True)]
