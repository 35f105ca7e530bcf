"""Normalizations of hidden states."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transformer_xl.config import ModelConfig
from transformer_xl.ops import rms_norm


class RMSNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich, 2019): scales by the root mean square, without a bias."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Normalize each position."""
        return rms_norm(x, self.weight, self.eps)


def make_norm(config: ModelConfig) -> nn.LayerNorm | RMSNorm:
    """Create the configured normalization of hidden states."""
    if config.norm == "rms":
        return RMSNorm(config.d_model, config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps)
