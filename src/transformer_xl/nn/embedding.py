"""Word embeddings and the encodings of relative positions."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import ModelConfig


class Embedding(nn.Module):
    """Word embeddings, projected to the model's width where theirs is another, times sqrt(D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.embed_width))
        self.proj = None
        if config.embed_width != config.d_model:
            self.proj = nn.Linear(config.embed_width, config.d_model, bias=False)
        self.scale = config.d_model**0.5

    def forward(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Embed the tokens."""
        embedded = F.embedding(tokens, self.weight)
        if self.proj is not None:
            # Under autocast too, what the layers add up stays in the precision of the weights.
            embedded = self.proj(embedded).to(self.weight.dtype)
        return embedded * self.scale


def relative_positions(
    S: int, d_model: int, clamp_len: int | None, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "S D"]:
    r"""Encode the distances ``S - 1, ..., 1, 0``, farthest first.

    $R_d = [\sin(d w), \cos(d w)]$ with $w_m = 10000^{-2m / D}$, all sines before all cosines
    (section 3.3 of the paper). Distances above ``clamp_len`` count as ``clamp_len``.
    """
    # The table grows in powers of two, so that a memory that fills up does not rebuild it.
    # Compiled code makes it anew, fused with what reads it: tracing does not see through caches.
    sinusoids = _sinusoids.__wrapped__ if torch.compiler.is_compiling() else _sinusoids
    table = sinusoids(1 << (S - 1).bit_length(), d_model, dtype, device)
    if clamp_len is None or clamp_len >= S:
        return table[:S].flip(0)
    distance = torch.arange(S - 1, -1, -1, device=device)
    return table[distance.clamp(max=clamp_len)]


@lru_cache(maxsize=32)
def _sinusoids(S: int, d_model: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Frequencies are rounded to float32, as they are in every published checkpoint; the angles
    # are not, because a distance above 256 is not even a number in bfloat16.
    frequency = 1 / (10_000 ** (torch.arange(0, d_model, 2, dtype=torch.float32) / d_model))
    angle = torch.outer(torch.arange(S, dtype=torch.float64), frequency.double())
    return torch.cat([angle.sin(), angle.cos()], 1).to(device, dtype)
