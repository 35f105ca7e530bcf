"""Attention of a token to a ring buffer of keys and values, by operations of torch."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from transformer_xl.model.positions import Positions


class RingView(NamedTuple):
    """The slots of the ring buffer that a step attends to."""

    newest: int | Int[Tensor, "1"]
    """The slot of the token itself."""
    places: slice
    """The slots that are attended to."""
    order: Int[Tensor, " S"] | None
    """Index of the distance of each slot, farthest first. None: the slots are in order."""
    hidden: Bool[Tensor, "B S"] | None
    """Mask of the slots that a stream does not see. None: all are seen."""
    n_seen: Int[Tensor, " B"]
    """How many slots a stream sees, its own included."""


def attend(
    q: Float[Tensor, "B 1 H K"],
    keys: Float[Tensor, "H B capacity K"],
    values: Float[Tensor, "H B capacity K"],
    positions: Positions,
    view: RingView,
) -> Float[Tensor, "B 1 H K"]:
    """Attend to the slots of a ring; the token's own keys and values have been written there.

    The position scores, computed for all distances, are gathered into the order of the slots.
    """
    keys, values = (ring[:, :, view.places] for ring in (keys, values))
    q = q[:, 0].to(keys.dtype)
    positions = positions.to(q.dtype)
    scale, n_distances = q.shape[2] ** -0.5, keys.shape[2]
    by_content, by_position = (
        ((q + bias) * scale).transpose(0, 1)
        for bias in (positions.content_bias, positions.position_bias)
    )
    position = by_position @ positions.r[-n_distances:].permute(1, 2, 0)
    if (distance_bias := positions.distance_bias) is not None:
        position = position + distance_bias[-n_distances:].T[:, None] * scale
    if view.order is not None:
        position = position.index_select(2, view.order)
    # A row vector times a matrix: with a single column, bmm is several times slower.
    score = (by_content[:, :, None] @ keys.mT)[:, :, 0] + position
    if view.hidden is not None:
        score = score.masked_fill(view.hidden, -torch.inf)
    dtype = torch.promote_types(q.dtype, torch.float32)
    weight = score.softmax(-1, dtype=dtype).to(q.dtype)
    return (weight[:, :, None] @ values).permute(1, 2, 0, 3)
