"""The gate of the Gated Transformer-XL, in place of a residual connection."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.model.wrapping import projected

GATE_BIAS = 2.0
"""What $b_g$ begins with: what goes in is most of what comes out."""


class GRUGate(nn.Module):
    r"""Chooses, number by number, between what came in and what a block makes of it.

    The gate of GTrXL (Parisotto et al., 2019, arXiv 1910.06764, section 3.2, "Gated-Recurrent-Unit-
    type gating"), with x what goes into a block and y what comes out of it:

    $$r = \sigma(W_r y + U_r x), \quad z = \sigma(W_z y + U_z x - b_g)$$
    $$\hat h = \tanh(W_g y + U_g (r \odot x)), \quad g(x, y) = (1 - z) \odot x + z \odot \hat h$$

    The larger $b_g$, the nearer a layer is to the identity; it begins at 2 and is learned. Each
    gate has 6 D^2 + D weights.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D = config.d_model
        # W_r, W_z and W_g; U_r and U_z; U_g.
        self.made_proj = nn.Linear(D, 3 * D, bias=False)
        self.old_proj = nn.Linear(D, 2 * D, bias=False)
        self.reset_proj = nn.Linear(D, D, bias=False)
        self.bias = nn.Parameter(torch.empty(D))

    def forward(
        self, x: Float[Tensor, "B T D"], y: Float[Tensor, "B T D"]
    ) -> Float[Tensor, "B T D"]:
        """Return what a block puts out.

        Args:
            x: What went into it.
            y: What it has made of that.
        """
        D = x.shape[-1]
        made, candidate = projected(self.made_proj, y).split([2 * D, D], -1)
        r, z = (made + projected(self.old_proj, x)).chunk(2, -1)
        candidate = candidate + projected(self.reset_proj, r.sigmoid() * x)
        z = (z - self.bias).sigmoid()
        # Under autocast too, what the layers hand on stays in the precision of the weights.
        return x + z * (candidate.tanh() - x)
