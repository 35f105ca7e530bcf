r"""Relative attention without a copy for the shift: the fast path in plain PyTorch.

The product of the queries with the position keys has one row a query and one column a distance.
With one column more in front, (T, S + 1), and read with a row stride of S from offset T, the same
numbers *are* the shifted matrix: key j of query i is column T - i + j of row i. The content
product is added into that view. What lies in the future of its query is hidden afterwards.

Queries are handled in blocks, so that keys which no query of a block sees are not computed, and
heads in groups, so that the scores of a group stay in the cache. Nothing of the size of the scores
is kept for the backward pass, which computes them once more: two products and a softmax for less
memory.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl.ops.dropout import draw_kept, new_seed, rounded
from transformer_xl.ops.products import batches_take_onednn, fast_batches
from transformer_xl.ops.reference import before_first

QUERY_BLOCK = 256
"""Most queries of a block: smaller blocks skip more of the future, larger products run faster."""
GROUP_BYTES = 4 << 20
"""Size of the scores of a group of heads: about what the cache of a core holds."""

FEW_ROWS = 8
"""Rows below which a product is one of few rows."""


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
    first_key: Int[Tensor, " B"] | Int[Tensor, "B T"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B T H K"]:
    """Attend from the segment to the memory and to itself; as the reference does."""
    operands = (q, k, v, r, content_bias, position_bias, distance_bias)
    hidden = (attn_len, first_key)
    seed = None
    if dropout:
        # The backward pass draws the same numbers again.
        seed = new_seed()
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands):
        return cast(Tensor, _SkewAttention.apply(*operands, *hidden, dropout, seed))
    return _forward(_Attention(*operands, *hidden, dropout, seed))


class _SkewAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *operands, attn_len, first_key, dropout, seed = arguments
        ctx.save_for_backward(*operands, first_key)
        ctx.settings = attn_len, dropout, seed
        return _forward(_Attention(*arguments))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        *operands, first_key = ctx.saved_tensors
        attn_len, dropout, seed = ctx.settings
        arguments: Sequence[Any] = [*operands, attn_len, first_key, dropout, seed]
        attention = _Attention(*arguments)
        return *_backward(attention, grad_outputs[0]), None, None, None, None


class _Block(NamedTuple):
    """Some queries, the keys that any of them sees, and room for their scores.

    N counts heads times streams.
    """

    queries: slice
    keys: slice
    q_content: Float[Tensor, "N T K"]
    q_position: Float[Tensor, "H streams_and_T K"]
    k: Float[Tensor, "N S K"]
    v: Float[Tensor, "N S K"]
    r: Float[Tensor, "H columns K"]
    """Position keys of S distances; of one more, if there is a shift."""


class _Group(NamedTuple):
    """Some heads of a block."""

    heads: slice
    matrices: slice
    """The same heads, with their streams."""
    score: Float[Tensor, "N T S"]
    """What positions add to the scores; minus infinity where a query must not look."""


class _Attention:
    """What is attended to, divided into blocks of queries and groups of heads.

    Heads are outermost: the position keys are shared by the streams, so the position product of a
    head is one product over all streams, and the gradient of the keys needs no sum afterwards.
    Keys and values kept in a memory have this layout already.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        r: Tensor,
        content_bias: Tensor,
        position_bias: Tensor,
        distance_bias: Tensor | None,
        attn_len: int | None,
        first_key: Tensor | None,
        dropout: float,
        seed: int | None,
    ) -> None:
        self.q, self.k, self.v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
        self.r = r.transpose(0, 1)
        self.H, self.B, self.T, self.K = self.q.shape
        self.S = k.shape[1]
        self.attn_len, self.first_key, self.dropout = attn_len, first_key, dropout
        self.scale = self.K**-0.5
        self.is_half = q.dtype.itemsize == 2
        self.content_bias, self.position_bias = (
            (bias * self.scale)[:, None, None] for bias in (content_bias, position_bias)
        )
        self.has_distance_bias = distance_bias is not None
        if distance_bias is not None:
            # One more number in each position key, and what the product multiplies it with.
            self.r = torch.cat([self.r, distance_bias.T[..., None]], -1)
        if self.T > 1:
            # The additional column; farther distances, where there are any, do as well.
            self.r = F.pad(self.r, (0, 0, 1, 0))
        # Where float32 is left to oneDNN for its speed, the kernel would go to MKL again.
        self.is_left = batches_take_onednn(q)
        self.has_kernel = q.device.type == "cpu" and not dropout and not self.is_left
        self.generator = None
        if seed is not None:
            self.generator = torch.Generator(q.device).manual_seed(seed)
        # Rooms that all groups use in turn; the allocator would not find the same places again.
        largest = 0
        for queries, keys in self._cuts():
            T, S = queries.stop - queries.start, keys.stop - keys.start
            largest = max(largest, self._group_size(T, S) * self.B * T * (S + 1))
        self.room, self.weight_room = q.new_empty(2, largest)

    def _cuts(self) -> Iterator[tuple[slice, slice]]:
        """Divide the queries; last ones first, because they see the most keys."""
        size = min(self.T, QUERY_BLOCK)
        for first in reversed(range(0, self.T, size)):
            queries = slice(first, min(first + size, self.T))
            start, stop = 0, self.S - self.T + queries.stop
            if self.attn_len is not None:
                start = max(0, self.S - self.T + first + 1 - self.attn_len)
            yield queries, slice(start, stop)

    def _group_size(self, T: int, S: int) -> int:
        # Only a processor's cache asks for groups of heads.
        if self.q.device.type != "cpu":
            return self.H
        size = GROUP_BYTES // max(1, self.B * T * S * self.q.element_size())
        groups = math.ceil(self.H / max(1, min(self.H, size)))
        size = math.ceil(self.H / groups)
        # An even number of matrices can be shared by threads.
        return size - 1 if size > 1 and size % 2 and groups > 1 else size

    def blocks(self) -> Iterator[_Block]:
        for queries, keys in self._cuts():
            T, S = queries.stop - queries.start, keys.stop - keys.start
            q = self.q[:, :, queries]
            q_content, q_position = (
                torch.add(bias, q, alpha=self.scale).contiguous()
                for bias in (self.content_bias, self.position_bias)
            )
            if self.has_distance_bias:
                q_position = F.pad(q_position, (0, 1), value=self.scale)
            k, v = (x[:, :, keys].flatten(0, 1) for x in (self.k, self.v))
            r = self.r[:, self.r.shape[1] - S - (T > 1) :]
            if T > 1 and (self.is_half or self.is_left):
                # oneDNN would bring into order, slowly, what does not lie side by side.
                r = r.contiguous()
                if not self.has_kernel:
                    k, v = k.contiguous(), v.contiguous()
            yield _Block(queries, keys, q_content.flatten(0, 1), q_position.flatten(1, 2), k, v, r)

    def groups(self, block: _Block) -> Iterator[_Group]:
        """Compute what positions add to the scores of a block, some heads after the other."""
        T, S = block.q_content.shape[1], block.k.shape[1]
        size = self._group_size(T, S)
        for head in range(0, self.H, size):
            heads = slice(head, min(head + size, self.H))
            matrices = slice(heads.start * self.B, heads.stop * self.B)
            q_position, r = block.q_position[heads], block.r[heads]
            if self.is_half and q_position.shape[1] < FEW_ROWS:
                # A few rows in half precision: many keys by few queries is the fast order.
                position = torch.bmm(r, q_position.mT).mT.contiguous()
            else:
                position = _product(q_position, r.mT, self.room)
            if T > 1 and self.attn_len is not None:
                # Columns stand for distances still, farthest first.
                position[..., : max(0, S + 1 - self.attn_len)] = -torch.inf
            score = _skew(position, T, S)
            if T > 1:
                score[..., S - T :] += _future(T, score.dtype, score.device)
            if self.first_key is not None:
                first_key = self.first_key
                if first_key.ndim == 2:
                    first_key = first_key[:, block.queries]
                hidden_BTS = before_first(first_key, block.keys.start, block.keys.stop)
                score.unflatten(0, (-1, self.B)).masked_fill_(hidden_BTS, -torch.inf)
            yield _Group(heads, matrices, score)

    def weights(self, block: _Block, group: _Group) -> tuple[Tensor, Tensor | None]:
        """Return the attention weights of a group; and 1 where dropout leaves one, 0 where not."""
        score, q, k = group.score, block.q_content[group.matrices], block.k[group.matrices]
        N, T, _ = score.shape
        if self.is_half and T < FEW_ROWS:
            score += torch.bmm(k, q.mT).mT
        else:
            score.baddbmm_(q, k.mT)
        weights = self.weight_room[: score.numel()].view(score.shape)
        if T == 1 or N == 1 or score.device.type != "cpu":
            torch.softmax(score, -1, out=weights)
        else:
            # Each matrix of the view is contiguous, all together are not, and would be copied. A
            # GPU copies them in less time than a kernel for each takes to begin.
            for one, result in zip(score.unbind(), weights.unbind(), strict=True):
                torch.softmax(one, -1, out=result)
        if self.generator is None:
            return weights, None
        return weights, draw_kept(weights, self.dropout, self.generator)

    def read(self, block: _Block, group: _Group) -> Float[Tensor, "N T K"]:
        """Sum the values of a group, each by its weight."""
        q, k, v = (x[group.matrices] for x in (block.q_content, block.k, block.v))
        if self.has_kernel:
            # What positions add is the mask of a kernel that leaves no scores behind.
            operands = (x.unflatten(0, (-1, self.B)) for x in (q, k, v, group.score))
            q, k, v, mask = operands
            return F.scaled_dot_product_attention(q, k, v, mask, scale=1.0).flatten(0, 1)
        weights, kept = self.weights(block, group)
        return torch.bmm(weights if kept is None else weights.mul_(kept), v)


def _forward(attention: _Attention) -> Float[Tensor, "B T H K"]:
    H, B, T, K = attention.q.shape
    out = attention.q.new_empty(B, T, H, K)
    with fast_batches(attention.q):
        for block in attention.blocks():
            for group in attention.groups(block):
                values = attention.read(block, group).unflatten(0, (-1, B))
                out[:, block.queries, group.heads] = values.permute(1, 2, 0, 3)
    return out.div_(1 - rounded(attention.dropout)) if attention.dropout else out


def _backward(attention: _Attention, d_out: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, r and of the three biases."""
    H, B, T, K = attention.q.shape
    S, columns = attention.S, attention.r.shape[1]
    dq = d_out.new_empty(H, B, T, K)
    # The first block, of the last queries, writes; what others find there, their products add to.
    dk, dv = d_out.new_empty(2, H * B, S, K)
    dr = torch.empty_like(attention.r, memory_format=torch.contiguous_format)
    # A sum over all tokens is added up in float32 at least.
    d_biases = d_out.new_zeros(2, H, K, dtype=torch.promote_types(d_out.dtype, torch.float32))
    grad_room = torch.empty_like(attention.weight_room)
    d_out = d_out.permute(2, 0, 1, 3)
    if attention.dropout:
        d_out = d_out / (1 - rounded(attention.dropout))
    with fast_batches(attention.q):
        for block in attention.blocks():
            d_values = d_out[:, :, block.queries].contiguous().flatten(0, 1)
            rows = slice(columns - block.r.shape[1], columns)
            beta = int(block.queries.stop < T)
            if not beta:
                for total, start in (
                    (dk, block.keys.start),
                    (dv, block.keys.start),
                    (dr, rows.start),
                ):
                    total[:, :start] = 0
            dq_content, dq_position = (
                x.new_empty(x.shape) for x in (block.q_content, block.q_position)
            )
            for group in attention.groups(block):
                heads, matrices, _ = group
                weights, kept = attention.weights(block, group)
                d_weights = _product(d_values[matrices], block.v[matrices].mT, grad_room)
                if kept is not None:
                    d_weights.mul_(kept)
                # In place of the gradient of the weights: each row is read before it is written.
                d_score = torch.ops.aten._softmax_backward_data.out(
                    d_weights, weights, -1, weights.dtype, grad_input=d_weights
                )
                if kept is not None:
                    weights.mul_(kept)
                dv[matrices, block.keys].baddbmm_(weights.mT, d_values[matrices], beta=beta)
                dk[matrices, block.keys].baddbmm_(d_score.mT, block.q_content[matrices], beta=beta)
                torch.bmm(d_score, block.k[matrices], out=dq_content[matrices])
                d_position = _unskew(d_score, attention.room, len(block.r[heads]))
                dr[heads, rows].baddbmm_(d_position.mT, block.q_position[heads], beta=beta)
                torch.bmm(d_position, block.r[heads], out=dq_position[heads])
            dq_content, dq_position = (
                x.view(H, B, -1, x.shape[-1])[..., :K] for x in (dq_content, dq_position)
            )
            for total, part in zip(d_biases, (dq_content, dq_position), strict=True):
                total += part.sum((1, 2), dtype=total.dtype)
            torch.add(dq_content, dq_position, out=dq[:, :, block.queries])
    d_content_bias, d_position_bias = (d_biases * attention.scale).to(dq.dtype)
    dr = dr[:, T > 1 :].transpose(0, 1)
    d_distance_bias = dr[..., K] if attention.has_distance_bias else None
    dq *= attention.scale
    dk, dv = (x.view(H, B, S, K) for x in (dk, dv))
    dq, dk, dv = (x.permute(1, 2, 0, 3) for x in (dq, dk, dv))
    return dq, dk, dv, dr[..., :K], d_content_bias, d_position_bias, d_distance_bias


def _product(a: Tensor, b: Tensor, room: Tensor) -> Tensor:
    """Multiply batches of matrices into a room that is large enough."""
    shape = (a.shape[0], a.shape[1], b.shape[2])
    return torch.bmm(a, b, out=room[: math.prod(shape)].view(shape))


def _skew(position: Tensor, T: int, S: int) -> Tensor:
    """See a position product, one row a query and one column a distance, by keys."""
    if T == 1:
        # One query sees all keys that are left, and its row need not move.
        return position.view(-1, 1, S)
    N = position.numel() // (T * (S + 1))
    return position.as_strided((N, T, S), (T * (S + 1), S, 1), position.storage_offset() + T)


def _unskew(d_score: Tensor, room: Tensor, heads: int) -> Tensor:
    """Bring the gradient of the scores into the layout of the position product."""
    N, T, S = d_score.shape
    if T == 1:
        return d_score.view(heads, -1, S)
    d_position = room[: N * T * (S + 1)].view(N, T, S + 1)
    # Before the view there are the first columns of the first row.
    d_position[:, 0, :T] = 0
    _skew(d_position, T, S).copy_(d_score)
    return d_position.view(heads, -1, S + 1)


@lru_cache(maxsize=64)
def _future(T: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what hides, added to the scores of T queries for their own keys, the future."""
    return torch.full((T, T), -torch.inf, dtype=dtype, device=device).triu(1)
