r"""Relative attention in plain PyTorch, with a view instead of a copy for the relative shift.

The position scores have a row for each query and a column for each distance. With an additional
column in front, (T, S + 1), and viewed with a row stride of S from offset T, the same values *are*
the shifted matrix (appendix B of the paper): key j of query i is column T - i + j of row i. Future
positions are masked there. Then either torch's fused attention takes the view as an additive mask
and adds the content product itself (``uses_fused``), or the product is added into the view and the
softmax computed (``weights``); the backward pass always does the latter.

In the names of section 3.3, $q^T k$ is term (a), $q^T r$ (b), $u^T k$ (c) and $v^T r$ (d). Two
products compute all four: ``q_content``, q + u, times the keys is (a) + (c); ``q_position``, q + v,
times the position keys is (b) + (d), with a column for each distance.

Queries are processed in blocks, which skips keys that no query of a block sees, and heads in
groups, whose scores fit in the cache. The backward pass recomputes the scores instead of saving
them.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl.ops.constants import cached
from transformer_xl.ops.dropout import draw_kept, new_seed, rounded
from transformer_xl.ops.products import batches_take_onednn, emulates, onednn
from transformer_xl.ops.reference import before_first

QUERY_BLOCK = 256
"""Maximum queries of a block: smaller blocks skip more masked keys, larger ones are faster."""
GROUP_BYTES = 4 << 20
"""Size of the scores of a group of heads: about the cache of a core."""

FEW_ROWS = 8
"""Products of fewer rows than this take the layout that is fast for few rows."""


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
    operands: Sequence[Any] = (q, k, v, r, content_bias, position_bias, distance_bias)
    # The backward pass draws the same numbers again.
    seed = new_seed() if dropout else None
    arguments: Sequence[Any] = [*operands, attn_len, first_key, dropout, seed]
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands):
        return cast(Tensor, _SkewAttention.apply(*arguments))
    return _forward(_widened(arguments)).to(q.dtype)


def _widened(arguments: Sequence[Any]) -> "_Attention":
    """Return the attention of operands, in float32 where the CPU only emulates their precision."""
    *operands, attn_len, first_key, dropout, seed = arguments
    q, *_ = operands
    if emulates(q.dtype, q.device.type):
        operands = [None if x is None else x.float() for x in operands]
    widened: Sequence[Any] = [*operands, attn_len, first_key, dropout, seed]
    return _Attention(*widened)


class _SkewAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *operands, attn_len, first_key, dropout, seed = arguments
        # Not widened, which takes half the memory.
        ctx.save_for_backward(*operands, first_key)
        ctx.settings = attn_len, dropout, seed
        return _forward(_widened(arguments)).to(operands[0].dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        *operands, first_key = ctx.saved_tensors
        attn_len, dropout, seed = ctx.settings
        attention = _widened([*operands, attn_len, first_key, dropout, seed])
        gradients = _backward(attention, grad_outputs[0].to(attention.q.dtype))
        each = zip(gradients, operands, strict=True)
        gradients = (None if dx is None else dx.to(x.dtype) for dx, x in each)
        return *gradients, None, None, None, None


class _Block(NamedTuple):
    """A block of queries with the keys that any of them sees; N is heads times streams."""

    queries: slice
    keys: slice
    q_content: Float[Tensor, "N T K"]
    q_position: Float[Tensor, "H streams_and_T K"]
    k: Float[Tensor, "N S K"]
    v: Float[Tensor, "N S K"]
    r: Float[Tensor, "H columns K"]
    """Position keys of S distances, and one more if there is a shift."""


class _Group(NamedTuple):
    """A group of heads of a block."""

    heads: slice
    matrices: slice
    """The same heads as indices of heads times streams."""
    score: Float[Tensor, "N T S"]
    """The position scores, minus infinity where masked. :meth:`_Attention.weights` adds the content
    scores in place, so it is called once."""


class _Attention:
    """The operands, divided into blocks of queries and groups of heads.

    Heads are outermost: position keys are shared by the streams, so the position scores of a head
    are one product over all streams, and the gradient of the keys needs no reduction. A memory of
    keys and values has the same layout.
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
            # As an additional column of the position keys, with a constant column of the queries.
            self.r = torch.cat([self.r, distance_bias.T[..., None]], -1)
        if self.T > 1:
            # The additional column, in front. In a block with fewer keys the next farther distance
            # stands there, which no query reads.
            self.r = F.pad(self.r, (0, 0, 1, 0))
        # The fused kernel uses MKL, even where oneDNN is faster.
        self.uses_onednn = batches_take_onednn(self.q)
        self.uses_fused = q.device.type == "cpu" and not dropout and not self.uses_onednn
        self.generator = None
        if seed is not None:
            self.generator = torch.Generator(q.device).manual_seed(seed)
        # Buffers shared by all groups, which the allocator would not reuse.
        largest = 0
        for queries, keys in self._cuts():
            T, S = queries.stop - queries.start, keys.stop - keys.start
            largest = max(largest, self._group_size(T, S) * self.B * T * (S + 1))
        self.buffer, self.weight_buffer = q.new_empty(2, largest)

    def _cuts(self) -> Iterator[tuple[slice, slice]]:
        """Yield blocks of queries with their keys, the last ones, with the most keys, first."""
        size = min(self.T, QUERY_BLOCK)
        for first in reversed(range(0, self.T, size)):
            queries = slice(first, min(first + size, self.T))
            start, stop = 0, self.S - self.T + queries.stop
            if self.attn_len is not None:
                start = max(0, self.S - self.T + first + 1 - self.attn_len)
            yield queries, slice(start, stop)

    def _group_size(self, T: int, S: int) -> int:
        # Groups of heads only help CPU caches.
        if self.q.device.type != "cpu":
            return self.H
        size = GROUP_BYTES // max(1, self.B * T * S * self.q.element_size())
        groups = math.ceil(self.H / max(1, min(self.H, size)))
        size = math.ceil(self.H / groups)
        # An even number of matrices can be divided among threads.
        return size - 1 if size > 1 and size % 2 and groups > 1 else size

    def blocks(self) -> Iterator[_Block]:
        for queries, keys in self._cuts():
            T, S = queries.stop - queries.start, keys.stop - keys.start
            q = self.q[:, :, queries]
            # q + u and q + v, scaled.
            q_content, q_position = (
                torch.add(bias, q, alpha=self.scale).contiguous()
                for bias in (self.content_bias, self.position_bias)
            )
            if self.has_distance_bias:
                q_position = F.pad(q_position, (0, 1), value=self.scale)
            k, v = (x[:, :, keys].flatten(0, 1) for x in (self.k, self.v))
            columns = S + 1 if T > 1 else S
            r = self.r[:, -columns:]
            if T > 1 and (self.is_half or self.uses_onednn):
                # oneDNN is slow for operands that are not contiguous.
                r = r.contiguous()
                if not self.uses_fused:
                    k, v = k.contiguous(), v.contiguous()
            yield _Block(queries, keys, q_content.flatten(0, 1), q_position.flatten(1, 2), k, v, r)

    def groups(self, block: _Block) -> Iterator[_Group]:
        """Yield the position scores of a block by groups of heads, which share a buffer."""
        T, S = block.q_content.shape[1], block.k.shape[1]
        size = self._group_size(T, S)
        for head in range(0, self.H, size):
            heads = slice(head, min(head + size, self.H))
            matrices = slice(heads.start * self.B, heads.stop * self.B)
            # Terms (b) + (d), by distance.
            q_position, r = block.q_position[heads], block.r[heads]
            if self.is_half and q_position.shape[1] < FEW_ROWS:
                # With few rows in half precision, keys times queries is faster.
                position = torch.bmm(r, q_position.mT).mT.contiguous()
            else:
                position = _product(q_position, r.mT, self.buffer)
            if T > 1 and self.attn_len is not None:
                # Column c still has distance S - c. (For a single query, `_cuts` left them out.)
                position[..., : max(0, S + 1 - self.attn_len)] = -torch.inf
            score = _skew(position, T, S)
            if T > 1:
                score[..., S - T :] += _future(T, score.dtype, score.device)
            if self.first_key is not None:
                first_key = self.first_key
                if first_key.ndim == 2:
                    first_key = first_key[:, block.queries]
                masked_BTS = before_first(first_key, block.keys.start, block.keys.stop)
                score.unflatten(0, (-1, self.B)).masked_fill_(masked_BTS, -torch.inf)
            yield _Group(heads, matrices, score)

    def weights(self, block: _Block, group: _Group) -> tuple[Tensor, Tensor | None]:
        """Return the attention weights of a group before dropout, and the dropout mask if any."""
        score, q, k = group.score, block.q_content[group.matrices], block.k[group.matrices]
        N, T, _ = score.shape
        # Terms (a) + (c), added to (b) + (d), which the relative shift has moved to their keys.
        if self.is_half and T < FEW_ROWS:
            score += torch.bmm(k, q.mT).mT
        else:
            score.baddbmm_(q, k.mT)
        weights = self.weight_buffer[: score.numel()].view(score.shape)
        if T == 1 or N == 1 or score.device.type != "cpu":
            torch.softmax(score, -1, out=weights)
        else:
            # Each matrix of the view is contiguous, but the batch is not and would be copied. On a
            # GPU, the copy is faster than a kernel launch for each.
            for one, result in zip(score.unbind(), weights.unbind(), strict=True):
                torch.softmax(one, -1, out=result)
        if self.generator is None:
            return weights, None
        return weights, draw_kept(weights, self.dropout, self.generator)

    def attended(self, block: _Block, group: _Group) -> Float[Tensor, "N T K"]:
        """Return the weighted sums of the values of a group."""
        q, k, v = (x[group.matrices] for x in (block.q_content, block.k, block.v))
        if self.uses_fused:
            # The position scores are the additive mask of the fused kernel.
            operands = (x.unflatten(0, (-1, self.B)) for x in (q, k, v, group.score))
            q, k, v, mask = operands
            return F.scaled_dot_product_attention(q, k, v, mask, scale=1.0).flatten(0, 1)
        weights, kept = self.weights(block, group)
        return torch.bmm(weights if kept is None else weights.mul_(kept), v)


def _forward(attention: _Attention) -> Float[Tensor, "B T H K"]:
    H, B, T, K = attention.q.shape
    out = attention.q.new_empty(B, T, H, K)
    with onednn(attention.uses_onednn):
        for block in attention.blocks():
            for group in attention.groups(block):
                values = attention.attended(block, group).unflatten(0, (-1, B))
                out[:, block.queries, group.heads] = values.permute(1, 2, 0, 3)
    return out.div_(1 - rounded(attention.dropout)) if attention.dropout else out


def _backward(attention: _Attention, d_out: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, r and of the three biases."""
    H, B, T, K = attention.q.shape
    S, columns = attention.S, attention.r.shape[1]
    dq = d_out.new_empty(H, B, T, K)
    # The first block, of the last queries, overwrites; the others accumulate.
    dk, dv = d_out.new_empty(2, H * B, S, K)
    dr = torch.empty_like(attention.r, memory_format=torch.contiguous_format)
    # Sums over all tokens are accumulated in float32 at least.
    d_biases = d_out.new_zeros(2, H, K, dtype=torch.promote_types(d_out.dtype, torch.float32))
    grad_buffer = torch.empty_like(attention.weight_buffer)
    d_out = d_out.permute(2, 0, 1, 3)
    if attention.dropout:
        d_out = d_out / (1 - rounded(attention.dropout))
    with onednn(attention.uses_onednn):
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
                d_weights = _product(d_values[matrices], block.v[matrices].mT, grad_buffer)
                if kept is not None:
                    d_weights.mul_(kept)
                # In place, which is safe as each row is read before it is written.
                d_score = torch.ops.aten._softmax_backward_data.out(
                    d_weights, weights, -1, weights.dtype, grad_input=d_weights
                )
                if kept is not None:
                    weights.mul_(kept)
                dv[matrices, block.keys].baddbmm_(weights.mT, d_values[matrices], beta=beta)
                dk[matrices, block.keys].baddbmm_(d_score.mT, block.q_content[matrices], beta=beta)
                torch.bmm(d_score, block.k[matrices], out=dq_content[matrices])
                d_position = _unskew(d_score, attention.buffer, len(block.r[heads]))
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


def _product(a: Tensor, b: Tensor, buffer: Tensor) -> Tensor:
    """Multiply batches of matrices into a buffer."""
    shape = (a.shape[0], a.shape[1], b.shape[2])
    return torch.bmm(a, b, out=buffer[: math.prod(shape)].view(shape))


def _skew(position: Tensor, T: int, S: int) -> Tensor:
    r"""Return position scores as a view with a column for each key.

    Entry [n, t, s] of the view is ``position[n, t, s + T - t]``: column c of a row stands for
    distance S - c, and key s lies at distance S - T + t - s of query t. A key behind its query,
    s > S - T + t, has no such column: its entry is one of the next row and undefined, so the
    caller masks it. The first T entries of a matrix are not part of the view.

    Args:
        position: Scores by distance, as contiguous matrices of shape (N, T, S + 1), or of any shape
            with the same layout, such as (H, B * T, S + 1). The first column is the additional one
            in front. With T = 1 there is none: (N, 1, S).
        T: Number of queries.
        S: Number of keys.

    Returns:
        Scores by key, of shape (N, T, S). They share the memory of ``position``.
    """
    if T == 1:
        # A single query needs no shift.
        return position.view(-1, 1, S)
    N = position.numel() // (T * (S + 1))
    return position.as_strided((N, T, S), (T * (S + 1), S, 1), position.storage_offset() + T)


def _unskew(d_score: Tensor, buffer: Tensor, n_heads: int) -> Tensor:
    """Return the gradient of position scores from that of the scores: the adjoint of `_skew`.

    Args:
        d_score: Gradient of the scores by key, of shape (N, T, S), and zero for masked keys. N is
            ``n_heads`` times the number of streams.
        buffer: At least N * T * (S + 1) numbers, which are overwritten.
        n_heads: Number of heads.

    Returns:
        The gradient by distance, of shape (n_heads, streams * T, S + 1), in ``buffer``. With T = 1
        there is no additional column: a view of ``d_score``, of shape (n_heads, streams, S).
    """
    N, T, S = d_score.shape
    if T == 1:
        return d_score.view(n_heads, -1, S)
    d_position = buffer[: N * T * (S + 1)].view(N, T, S + 1)
    # The view does not cover the first columns of the first row.
    d_position[:, 0, :T] = 0
    _skew(d_position, T, S).copy_(d_score)
    return d_position.view(n_heads, -1, S + 1)


@cached(64)
def _future(T: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the additive causal mask of T queries for the keys of the segment."""
    return torch.full((T, T), -torch.inf, dtype=dtype, device=device).triu(1)
