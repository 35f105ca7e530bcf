"""Gates in the place of residual connections."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.model.parts import PreNorm
from transformer_xl.ops import Linear

GATE_BIAS = 2.0
"""Initial $b_g$, at which a gate is close to the identity."""


class GRUGate(nn.Module):
    r"""Interpolates elementwise between the input of a block and its output.

    The gate of GTrXL (Parisotto et al., 2019, arXiv 1910.06764, section 3.2, "Gated-Recurrent-Unit-
    type gating"), with x the input of a block and y its output:

    $$r = \sigma(W_r y + U_r x), \quad z = \sigma(W_z y + U_z x - b_g)$$
    $$\hat h = \tanh(W_g y + U_g (r \odot x)), \quad g(x, y) = (1 - z) \odot x + z \odot \hat h$$

    The larger $b_g$, the closer a layer is to the identity; it is initialized to 2 and learned.
    Each gate has 6 D^2 + D parameters.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D = config.d_model
        # W_r, W_z and W_g; U_r and U_z; U_g.
        self.made_proj = Linear(D, 3 * D, bias=False)
        self.old_proj = Linear(D, 2 * D, bias=False)
        self.reset_proj = Linear(D, D, bias=False)
        self.bias = nn.Parameter(torch.empty(D))

    def forward(
        self, x: Float[Tensor, "B T D"], y: Float[Tensor, "B T D"]
    ) -> Float[Tensor, "B T D"]:
        """Gate a block.

        Args:
            x: Its input.
            y: Its output.
        """
        D = x.shape[-1]
        of_output, candidate = self.made_proj(y).split([2 * D, D], -1)
        r, z = (of_output + self.old_proj(x)).chunk(2, -1)
        candidate = candidate + self.reset_proj(r.sigmoid() * x)
        z = (z - self.bias).sigmoid()
        # Under autocast too, the residual stream stays in the precision of the weights.
        return x + z * (candidate.tanh() - x)


class GatedPreNorm(PreNorm):
    r"""The layer of GTrXL (Parisotto et al., 2019, sections 3.1 and 3.2).

    Gates replace the residual connections, and a ReLU is applied to the output of each block first.
    With E the input of the layer, M its memory, f the feed-forward network:

    $$Y = g(E, \mathrm{ReLU}(\mathrm{Attention}(\mathrm{LayerNorm}([\mathrm{SG}(M) \circ E]))))$$
    $$E' = g'(Y, \mathrm{ReLU}(f(\mathrm{LayerNorm}(Y))))$$
    """

    def after(self, norm: nn.Module, gate: nn.Module | None, x: Tensor, y: Tensor) -> Tensor:
        """Return the output of a block, given its input and what it computed."""
        assert gate is not None
        return gate(x, torch.relu(y))
