"""Residual connections of all layers to the embedding.

They gain 0.011 nats a note of music (docs/tasks/music.md).
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from transformer_xl.model.parts import LayerInput, Residuals

if TYPE_CHECKING:
    from transformer_xl.model.transformer_xl import TransformerXL


class EmbeddingResiduals(Residuals):
    r"""Mixes the normalized embedding into the input of every layer but the first.

    With the output $\hat h^{n-1}$ of the layer before and learned numbers $\mu$, it is

    $$h^{n-1} = \mu^n_1 \hat h^{n-1} + \mu^n_2 \mathrm{RMSNorm}(h^0)$$
    """

    def add_parameters(self, model: "TransformerXL") -> None:
        """Register both factors of all layers but the first."""
        n_others = model.config.n_layer - 1
        model.embedding_own = nn.Parameter(torch.empty(n_others))
        model.embedding_first = nn.Parameter(torch.empty(n_others))

    def __call__(self, model: "TransformerXL", x: Float[Tensor, "B T D"]) -> LayerInput:
        """See :class:`Residuals`."""
        normalized = F.rms_norm(x, x.shape[-1:], eps=model.config.norm_eps)
        own, first = model.embedding_own, model.embedding_first
        assert own is not None
        assert first is not None

        def layer_input(n: int, output: Tensor) -> Tensor:
            if n == 0:
                return output
            # The precision of autocast, which the factors do not have.
            precision = output.dtype
            return output * own[n - 1].to(precision) + normalized * first[n - 1].to(precision)

        return layer_input
