r"""Relative attention without a copy for the shift: the fast path in plain PyTorch.

The product of the queries with the position keys has one row a query and one column a distance.
Computed with one column more, (T, S + 1), and read with a row stride of S from offset T - 1, the
same numbers *are* the shifted matrix: position (i, j) of the view is column T - 1 - i + j of row i.
So the shift costs nothing, forward and backward, and what must be hidden is written before the
view is taken: the future lies in the first T - 1 - i columns of row i and in the additional one,
keys beyond ``attn_len`` in the first S - attn_len columns of every row.

Queries are handled in blocks, so that keys which no query of a block sees are not computed, and
heads in groups, so that the scores of a group stay in the cache. Only the attention weights are
kept for the backward pass.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl.ops.products import fast_batches

QUERY_BLOCK = 128
"""Most queries of a block: smaller blocks skip more of the future, larger products run faster."""
GROUP_BYTES = 2 << 20
"""Size of the scores of a group of heads: about what the cache of a few cores holds."""


def rel_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S H K"],
    v: Float[Tensor, "B S H K"],
    r: Float[Tensor, "S H K"],
    content_bias: Float[Tensor, "H K"],
    position_bias: Float[Tensor, "H K"],
    *,
    distance_bias: Float[Tensor, "S H"] | None = None,
    attn_len: int | None = None,
    first_key: Int[Tensor, " B"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B T H K"]:
    """Attend from the segment to the memory and to itself; as the reference does."""
    scale = q.shape[3] ** -0.5
    q_content, q_position, k, v = (
        _heads_first(x) for x in ((q + content_bias) * scale, (q + position_bias) * scale, k, v)
    )
    r = r.transpose(0, 1)
    if distance_bias is not None:
        # One more number in each position key, and what the product multiplies it with.
        q_position = F.pad(q_position, (0, 1), value=scale)
        r = torch.cat([r, distance_bias.T[..., None]], -1)
    if q.shape[1] > 1:
        # The additional column of the position product comes from a row of zeros.
        r = F.pad(r, (0, 0, 0, 1))
    operands = (q_content, q_position, k, v, r)
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        out = _SkewAttention.apply(*operands, attn_len, first_key, dropout)
    else:
        out = _forward(*operands, attn_len, first_key, dropout, keep=False)[0]
    return cast(Tensor, out).permute(1, 2, 0, 3)


def _heads_first(x: Float[Tensor, "B T H K"]) -> Float[Tensor, "H B T K"]:
    # Heads outermost: the position keys are shared by the streams, so the position product of a
    # head is one product over all streams, and the gradient of the keys needs no sum afterwards.
    # Keys and values kept in a memory have this layout already and are not copied.
    x = x.permute(2, 0, 1, 3)
    return x if x.stride(0) == x.shape[1] * x.stride(1) else x.contiguous()


class _Block(NamedTuple):
    """Some heads and queries, the keys that any of these queries sees, and their weights."""

    heads: slice
    queries: slice
    keys: slice
    positions: slice
    weights: slice
    """Where the attention weights of the block lie among all of them."""
    shape: tuple[int, int, int]
    """Heads times streams, queries, keys."""

    @property
    def room(self) -> int:
        """Numbers in the position product of the block."""
        return self.shape[0] * self.shape[1] * (self.shape[2] + 1)


def _blocks(q: Tensor, S: int, attn_len: int | None) -> list[_Block]:
    """Divide the work; only a processor's cache asks for groups of heads."""
    H, B, T, _ = q.shape
    blocks = []
    size = min(T, QUERY_BLOCK)
    group = H
    if q.device.type == "cpu":
        group = max(1, GROUP_BYTES // (B * size * S * q.element_size()))
    weights = 0
    for head in range(0, H, group):
        heads = slice(head, min(head + group, H))
        for first in range(0, T, size):
            queries = slice(first, min(first + size, T))
            end = S - T + queries.stop
            keys = slice(0 if attn_len is None else max(0, S - T + first + 1 - attn_len), end)
            n_keys = end - keys.start
            # A block that has to be skewed takes the row of zeros, too.
            positions = slice(S - n_keys, S + (queries.stop - first > 1))
            shape = ((heads.stop - head) * B, queries.stop - first, n_keys)
            n_weights = shape[0] * shape[1] * shape[2]
            place = slice(weights, weights + n_weights)
            blocks.append(_Block(heads, queries, keys, positions, place, shape))
            weights += n_weights
    return blocks


class _SkewAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_content: Tensor,
        q_position: Tensor,
        k: Tensor,
        v: Tensor,
        r: Tensor,
        attn_len: int | None,
        first_key: Tensor | None,
        dropout: float,
    ) -> Tensor:
        operands = (q_content, q_position, k, v, r)
        out, ctx.blocks, weights, kept = _forward(
            *operands, attn_len, first_key, dropout, keep=True
        )
        # All weights are one tensor that autograd releases as soon as it has been used.
        ctx.save_for_backward(*operands, weights, kept)
        ctx.dropout = dropout
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        q_content, q_position, k, v, r, weights, kept = ctx.saved_tensors
        d_out = grad_outputs[0].contiguous()
        dq_content, dq_position = torch.empty_like(q_content), torch.empty_like(q_position)
        dk, dv, dr = torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(r)
        # Two rooms that all blocks use in turn: the weights' gradient, then the positions' in its
        # place; and the scores' gradient. The allocator would not find the same places again.
        room, score_room = weights.new_empty(2, max(b.room for b in ctx.blocks))
        with fast_batches(q_content):
            for block in ctx.blocks:
                queries = (block.heads, slice(None), block.queries)
                keys = (block.heads, slice(None), block.keys)
                positions = (block.heads, block.positions)
                d_out_block = d_out[queries].flatten(0, 1)
                weight = weights[block.weights].view(block.shape)
                dropped = _dropped(weight, block, kept, ctx.dropout)
                dv[keys].flatten(0, 1).baddbmm_(dropped.mT, d_out_block)
                d_dropped = _product(d_out_block, v[keys].flatten(0, 1).mT, room)
                d_weight = _dropped(d_dropped, block, kept, ctx.dropout)
                d_score = score_room[: weight.numel()].view(block.shape)
                torch.ops.aten._softmax_backward_data.out(
                    d_weight, weight, -1, weight.dtype, grad_input=d_score
                )
                dq_content[queries] = torch.bmm(d_score, k[keys].flatten(0, 1)).view_as(
                    q_content[queries]
                )
                dk[keys].flatten(0, 1).baddbmm_(d_score.mT, q_content[queries].flatten(0, 1))
                q_block = q_position[queries]
                d_position = _unskew(d_score, room).view(
                    q_block.shape[0], -1, r[positions].shape[1]
                )
                dq_position[queries] = torch.bmm(d_position, r[positions]).view_as(q_block)
                dr[positions] += torch.bmm(d_position.mT, q_block.flatten(1, 2))
        return dq_content, dq_position, dk, dv, dr, None, None, None


def _forward(
    q_content: Tensor,
    q_position: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    attn_len: int | None,
    first_key: Tensor | None,
    dropout: float,
    *,
    keep: bool,
) -> tuple[Tensor, list[_Block], Tensor, Tensor | None]:
    """Attend block by block; ``keep`` the weights, and which of them dropout left."""
    B = q_content.shape[1]
    blocks = _blocks(q_content, k.shape[2], attn_len)
    out = torch.empty_like(q_content)
    # Without a backward pass each block takes the place of the one before it, unless they are
    # dropped: one mask for all blocks would not be chance.
    keep = keep or dropout > 0
    n_weights = blocks[-1].weights.stop if keep else max(math.prod(b.shape) for b in blocks)
    weights = q_content.new_empty(n_weights)
    kept = None
    if dropout:
        kept = torch.empty(n_weights, dtype=torch.bool, device=k.device).bernoulli_(1 - dropout)
    room = q_content.new_empty(max(block.room for block in blocks))
    with fast_batches(q_content):
        for block in blocks:
            if not keep:
                block = block._replace(weights=slice(0, math.prod(block.shape)))
            q_block = q_position[block.heads, :, block.queries]
            position = _product(q_block.flatten(1, 2), r[block.heads, block.positions].mT, room)
            weight = torch.baddbmm(
                _skew(position.view(*block.shape[:2], -1), attn_len),
                q_content[block.heads, :, block.queries].flatten(0, 1),
                k[block.heads, :, block.keys].flatten(0, 1).mT,
                out=weights[block.weights].view(block.shape),
            )
            if first_key is not None:
                key = torch.arange(block.keys.start, block.keys.stop, device=k.device)
                hidden_BS = key < first_key[:, None]
                weight.unflatten(0, (-1, B)).masked_fill_(hidden_BS[:, None], -torch.inf)
            torch.softmax(weight, -1, out=weight)
            dropped = _dropped(weight, block, kept, dropout)
            values = torch.bmm(dropped, v[block.heads, :, block.keys].flatten(0, 1))
            out[block.heads, :, block.queries] = values.view(*q_block.shape[:3], -1)
    return out, blocks, weights, kept


def _dropped(x: Tensor, block: _Block, kept: Tensor | None, dropout: float) -> Tensor:
    """Apply dropout to the weights of a block, or to their gradient."""
    if kept is None:
        return x
    return (x * kept[block.weights].view(block.shape)).div_(1 - dropout)


def _skew(position: Tensor, attn_len: int | None) -> Tensor:
    """See a position product of shape (N, T, S + 1) as (N, T, S) by keys, what is hidden -inf."""
    N, T = position.shape[:2]
    if T == 1:
        # One query sees all that is left after the cut to attn_len, and its row need not move.
        return position
    S = position.shape[2] - 1
    position[..., S] = -torch.inf
    position[..., : T - 1].masked_fill_(_before_view(T, position.device), -torch.inf)
    if attn_len is not None and attn_len < S:
        position[..., : S - attn_len] = -torch.inf
    return position.as_strided((N, T, S), (T * (S + 1), S, 1), T - 1)


def _product(a: Tensor, b: Tensor, room: Tensor) -> Tensor:
    """Multiply batches of matrices into a room that is large enough."""
    shape = (a.shape[0], a.shape[1], b.shape[2])
    return torch.bmm(a, b, out=room[: math.prod(shape)].view(shape))


def _unskew(d_score: Tensor, room: Tensor) -> Tensor:
    """Bring the gradient of the scores, (N, T, S), into the layout of the position product."""
    N, T, S = d_score.shape
    if T == 1:
        return d_score
    flat = room[: N * T * (S + 1)].view(N, T * (S + 1))
    flat[:, : T - 1] = 0
    flat[:, -1] = 0
    flat.as_strided((N, T, S), (T * (S + 1), S, 1), T - 1).copy_(d_score)
    return flat


@lru_cache(maxsize=64)
def _before_view(T: int, device: torch.device) -> Tensor:
    # Row i of the view begins T - 1 - i columns into row i of the product.
    return torch.ones(T, max(T - 1, 0), dtype=torch.bool, device=device).tril(-1).flip(0)
