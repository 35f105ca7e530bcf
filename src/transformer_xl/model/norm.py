"""Normalization of hidden states, and of the queries and keys of heads."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.ops import rms_norm


class RMSNorm(nn.Module):
    """Division by the root of the mean square, then a weight for each number."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Normalize each position."""
        return rms_norm(x, self.weight, self.eps)


def make_norm(config: ModelConfig) -> nn.LayerNorm | RMSNorm:
    """Make a normalization of hidden states, of the configured kind."""
    if config.norm == "rms":
        return RMSNorm(config.d_model, config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps)
