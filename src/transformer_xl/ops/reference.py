"""Relative attention in plain PyTorch: the definition of the operation.

Every other file in this folder computes the same function faster and is tested against this one.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


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
    """Attend from the segment to the memory and to itself; see :mod:`transformer_xl.ops`."""
    weight_BHTS = attention_weights(
        q,
        k,
        r,
        content_bias,
        position_bias,
        distance_bias=distance_bias,
        attn_len=attn_len,
        first_key=first_key,
    )
    weight_BHTS = F.dropout(weight_BHTS.to(v.dtype), dropout)
    return torch.einsum("bhts,bshk->bthk", weight_BHTS, v)


def attention_weights(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S H K"],
    r: Float[Tensor, "S H K"],
    content_bias: Float[Tensor, "H K"],
    position_bias: Float[Tensor, "H K"],
    *,
    distance_bias: Float[Tensor, "S H"] | None = None,
    attn_len: int | None = None,
    first_key: Int[Tensor, " B"] | Int[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B H T S"]:
    """Return the attention weights, in float32 at least.

    The arguments are those of :func:`transformer_xl.ops.rel_attention`.
    """
    T, S, K = q.shape[1], k.shape[1], q.shape[3]
    # Terms (a) + (c) of section 3.3, by key.
    content_BHTS = torch.einsum("bthk,bshk->bhts", q + content_bias, k)
    # Terms (b) + (d), by distance.
    position_BHTS = torch.einsum("bthk,shk->bhts", q + position_bias, r)
    if distance_bias is not None:
        position_BHTS = position_BHTS + distance_bias.T[:, None]
    # From distances to keys (appendix B).
    position_BHTS = rel_shift(position_BHTS)
    # Section 3.3 leaves out the scale.
    score_BHTS = (content_BHTS + position_BHTS) * K**-0.5
    masked_TS = masked_keys(T, S, attn_len, q.device)
    score_BHTS = score_BHTS.masked_fill(masked_TS, -torch.inf)
    if first_key is not None:
        masked_BTS = before_first(first_key, 0, S)
        score_BHTS = score_BHTS.masked_fill(masked_BTS[:, None], -torch.inf)
    # Half precision is normalized in float32, as the fused kernels do.
    dtype = torch.promote_types(q.dtype, torch.float32)
    return score_BHTS.softmax(dim=-1, dtype=dtype)


def rel_shift(x_BHTS: Float[Tensor, "B H T S"]) -> Float[Tensor, "B H T S"]:
    """Convert columns by distance, farthest first, to columns by key (appendix B of the paper).

    The last query is in place; each query before it is one token closer to every key, so its row
    is shifted by one more column to the left. With three queries and no memory, ``.`` for future
    positions::

        a2 a1 a0        a0  .  .
        b2 b1 b0   ->   b1 b0  .
        c2 c1 c0        c2 c1 c0

    The values at future positions are undefined; the caller masks them.
    """
    B, H, T, S = x_BHTS.shape
    # With a column in front, rows have S + 1 values. Read as rows of S from value T on, row i
    # begins at column T - i of the wider row i.
    wider = F.pad(x_BHTS, (1, 0)).view(B, H, S + 1, T)
    return wider[:, :, 1:].reshape(B, H, T, S)


def masked_keys(T: int, S: int, attn_len: int | None, device: torch.device) -> Tensor:
    """Return the (T, S) mask of keys that a query does not see: future, or beyond ``attn_len``."""
    query = torch.arange(S - T, S, device=device)
    distance_TS = query[:, None] - torch.arange(S, device=device)
    masked_TS = distance_TS < 0
    if attn_len is not None:
        # Larger values do not fit into a tensor.
        masked_TS |= distance_TS >= min(attn_len, torch.iinfo(torch.int64).max)
    return masked_TS


def before_first(
    first_key: Int[Tensor, " B"] | Int[Tensor, "B T"], start: int, stop: int
) -> Bool[Tensor, "B rows keys"]:
    """Return the mask of the keys from ``start`` to ``stop`` that are before ``first_key``.

    It has a row for each query, or one for all queries of a stream.
    """
    key = torch.arange(start, stop, device=first_key.device)
    return key < first_key.view(first_key.shape[0], -1, 1)
