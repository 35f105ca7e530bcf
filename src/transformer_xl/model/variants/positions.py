"""Other positions than the paper's: learned relative ones, and absolute ones (its baselines)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transformer_xl.model.layer import Attention
from transformer_xl.model.positions import (
    LayerPositions,
    Positions,
    PositionScheme,
    bias_shape,
    distances,
    encoding_of,
)
from transformer_xl.model.segment import NO_LIMITS, View
from transformer_xl.ops import attention

if TYPE_CHECKING:
    from transformer_xl.model.transformer_xl import TransformerXL


class ShawTable(PositionScheme):
    r"""Learned relative positions (``attn_type`` 1; Shaw et al., 2018, arXiv 1803.02155).

    As in the authors' ablations, $A_{ij} = (q_i + u) \cdot k_j + q_i \cdot r_{i-j} + b_{i-j}$ with
    a table of keys r and numbers b for each layer. Distances beyond the table take its last row.
    """

    def add_parameters(self, model: "TransformerXL") -> None:
        """Register the bias u and the tables, whose first row is the nearest distance."""
        _, H, K = bias_shape(model)
        N, rows = model.config.n_layer, model.config.n_positions or 0
        model.content_bias = nn.Parameter(torch.empty(bias_shape(model)))
        model.distance_embedding = nn.Parameter(torch.empty(N, rows, H, K))
        model.distance_bias = nn.Parameter(torch.empty(N, rows, H))

    def encode(
        self, model: "TransformerXL", n_keys: int, n_queries: int, view: View
    ) -> Sequence[Positions]:
        """See :meth:`PositionScheme.encode`."""
        row = distances(n_keys, _last_row(model, view.clamp_len), model.device)
        u = model.content_bias.expand(model.config.n_layer, -1, -1)
        zero = torch.zeros_like(u[0])
        tables = zip(model.distance_embedding, u, model.distance_bias, strict=True)
        return [Positions(r[row], bias, zero, b[row]) for r, bias, b in tables]


class AbsolutePositions(NamedTuple):
    """Encodings that are added to the input of one layer: of the memory, and of the segment."""

    memory: Float[Tensor, "*B M D"]
    segment: Float[Tensor, "*B T D"]

    def placed(
        self, past: Float[Tensor, "B M D"], x: Float[Tensor, "B T D"]
    ) -> tuple[Float[Tensor, "B M D"], Float[Tensor, "B T D"]]:
        """Return memory and segment with their positions."""
        return past + self.memory, x + self.segment

    def without(self, n: int) -> "AbsolutePositions":
        """Return the positions without those of the ``n`` oldest keys."""
        return self._replace(memory=self.memory[..., n:, :])


class NoPositions:
    """In the place of the positions of a layer that has none of its own."""

    def placed(
        self, past: Float[Tensor, "B M D"], x: Float[Tensor, "B T D"]
    ) -> tuple[Float[Tensor, "B M D"], Float[Tensor, "B T D"]]:
        """Return memory and segment as they are."""
        return past, x

    def without(self, n: int) -> "NoPositions":
        """Return the same."""
        return self


class AbsoluteSinusoids(PositionScheme):
    """Sinusoids added to the input of the first layer (``attn_type`` 2; Vaswani et al., 2017).

    They count from the last real token of a row, the memory included: positions of cached states
    change with each segment. This is what section 3.3 of the paper replaces.
    """

    is_absolute = True

    def encode(
        self, model: "TransformerXL", n_keys: int, n_queries: int, view: View
    ) -> Sequence[LayerPositions]:
        """See :meth:`PositionScheme.encode`."""
        encoding = model.dropped_input(encoding_of(model, n_keys, view.clamp_len))
        first = _divided(encoding, n_queries, view)
        return [first, *[NoPositions()] * (model.config.n_layer - 1)]


class AbsoluteTable(PositionScheme):
    """A learned table of positions added to the input of every layer (``attn_type`` 3).

    As in the authors' ablations (Al-Rfou et al., 2018). Positions count as those of
    :class:`AbsoluteSinusoids`, and positions beyond the table take its last row.
    """

    is_absolute = True

    def add_parameters(self, model: "TransformerXL") -> None:
        """Register the tables, whose first row is the nearest position."""
        N, rows, D = model.config.n_layer, model.config.n_positions or 0, model.config.d_model
        model.position_embedding = nn.Parameter(torch.empty(N, rows, D))

    def encode(
        self, model: "TransformerXL", n_keys: int, n_queries: int, view: View
    ) -> Sequence[AbsolutePositions]:
        """See :meth:`PositionScheme.encode`."""
        row = distances(n_keys, _last_row(model, None), model.device)
        return [_divided(table[row], n_queries, view) for table in model.position_embedding]


def _last_row(model: "TransformerXL", clamp_len: int | None) -> int:
    assert model.config.n_positions is not None
    last = model.config.n_positions - 1
    return last if clamp_len is None else min(last, clamp_len)


def _divided(encoding: Float[Tensor, "S D"], T: int, view: View) -> AbsolutePositions:
    """Divide encodings into those of the memory and of the segment, for rows that are padded."""
    S = len(encoding)
    if (padding := view.padding) is not None:
        place = torch.arange(S, device=encoding.device) + padding[:, None]
        encoding = encoding[place.clamp(max=S - 1)]
        # The memory of a row of padding alone does not change.
        encoding = encoding.masked_fill((padding == T)[:, None, None], 0.0)
    return AbsolutePositions(encoding[..., : S - T, :], encoding[..., S - T :, :])


class ContentAttention(Attention):
    """Attention with content scores only, for absolute positions, a part of the input."""

    def forward(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B S H K"],
        v: Float[Tensor, "B S H K"],
        positions: LayerPositions,
        view: View = NO_LIMITS,
    ) -> Float[Tensor, "B T D"]:
        """Attend with the queries of a segment to the keys and values of memory and segment."""
        dropped = self.attn_dropout if self.training else 0.0
        limits = {"attn_len": view.attn_len, "first_key": view.first_key}
        return self.merged(attention(q, k.to(q.dtype), v.to(q.dtype), dropout=dropped, **limits))
