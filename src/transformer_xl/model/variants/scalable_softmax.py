"""A softmax that stays as sharp when there are more keys."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.model.segment import View

REFERENCE = 256
"""A number of keys with which nothing is scaled."""
INITIAL_GROWTH = 1 / math.log(REFERENCE)
"""With it, queries are scaled by log(n) / log(256)."""


class ScalableSoftmax(nn.Module):
    r"""Scales queries with the logarithm of how many keys they see.

    The more keys, the smaller the weight of each. With a query that sees n keys and a learned g of
    each head (Nakanishi, 2025, arXiv 2501.19399, of which this is the form with a bias),

    $$q \leftarrow (1 + g \log(n / 256))\, q$$

    before u and v are added.
    """

    def __init__(self, n_head: int) -> None:
        super().__init__()
        self.growth = nn.Parameter(torch.empty(n_head))

    def forward(
        self, q: Float[Tensor, "B T H K"], n_keys: int, view: View
    ) -> Float[Tensor, "B T H K"]:
        """Scale the queries of a segment, given how many keys memory and segment have."""
        T = q.shape[1]
        n_seen = torch.arange(n_keys - T + 1, n_keys + 1, device=q.device)
        if (first := view.first_key) is not None:
            # Padding sees nothing, and nobody reads what it gets.
            n_seen = (n_seen - (first if first.ndim == 2 else first[:, None])).clamp(min=1)
        if view.attn_len is not None:
            n_seen = n_seen.clamp(max=view.attn_len)
        # Not len(q), which is a number in a traced program.
        return self.scaled(q, n_seen.expand(q.shape[0], T))

    def scaled(
        self, q: Float[Tensor, "B T H K"], n_seen: Int[Tensor, "B T"]
    ) -> Float[Tensor, "B T H K"]:
        """Scale queries, given how many keys each of them sees."""
        growth = self.growth.to(torch.promote_types(self.growth.dtype, torch.float32))
        size = n_seen.to(growth.dtype).log() - math.log(REFERENCE)
        return q * (1 + growth * size[..., None])[..., None].to(q.dtype)


class PlainSoftmax(nn.Module):
    """The softmax of the paper: queries are as they are."""

    growth = None

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
