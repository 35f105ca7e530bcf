"""Operations with a reference and fast implementations, first of all relative attention.

Dimension key of the package: B streams, T queries (this segment), M remembered positions,
S keys (S = M + T), H heads, K head width, D model width, E embedding width, F feed-forward
width, V vocabulary, N layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from transformer_xl.errors import InputError
from transformer_xl.ops import native, reference, skew, triton
from transformer_xl.ops.constants import cached
from transformer_xl.ops.dropout import dropout, relu_dropout
from transformer_xl.ops.nll import IGNORED, linear_nll
from transformer_xl.ops.packed import PACKINGS, PackedWeight, packed_bytes
from transformer_xl.ops.products import (
    Linear,
    emulates,
    fast_batches,
    linear,
)
from transformer_xl.ops.rms_norm import rms_norm

__all__ = [
    "BACKENDS",
    "IGNORED",
    "PACKINGS",
    "Backend",
    "Choice",
    "Linear",
    "PackedWeight",
    "attention",
    "cached",
    "choose_backend",
    "dropout",
    "emulates",
    "fast_batches",
    "linear",
    "linear_nll",
    "native",
    "packed_bytes",
    "reference",
    "rel_attention",
    "relu_dropout",
    "rms_norm",
    "triton",
    "use_backend",
]

Backend = Literal["auto", "reference", "skew", "triton"]
BACKENDS = {
    "reference": reference.rel_attention,
    "skew": skew.rel_attention,
    "triton": triton.rel_attention,
}

# A global variable; a ContextVar would break torch.compile's graphs.
_backend: Backend = "auto"


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
    r"""Attend from the current segment to the memory and to itself.

    The score of query ``i`` for key ``j`` is the sum of a content term and a position term, four
    products in all (section 3.3 of the paper):

    $$A_{ij} = (q_i + u) \cdot k_j + (q_i + v) \cdot r_{i-j}$$

    Here i and j are places among the S keys: query t is at i = S - T + t, and $r_{i-j}$ is
    ``r[S - 1 - (i - j)]``. The last ``T`` keys are the segment; the ``S - T`` before them are the
    memory. Attention is causal. Scores are divided by the square root of the head width.

    Args:
        q: Queries of the segment.
        k: Keys of the memory, followed by those of the segment.
        v: Values, in the order of the keys.
        r: Projected position encodings, farthest first: ``r[n]`` belongs to distance ``S - 1 - n``.
        content_bias: The bias ``u``.
        position_bias: The bias ``v``.
        distance_bias: Added to the scores of each distance, in the order of ``r``; for learned
            relative positions. None: nothing.
        attn_len: How many keys a query sees, counting its own. None: all.
        first_key: Index of the first key that a stream sees, at most ``S - T``; or that a query
            sees, at most its own key. None: 0. Earlier keys are computed and masked.
        dropout: Probability of dropping an attention weight.

    Returns:
        The attended values, by head.

    Raises:
        InputError: The lengths of queries, keys and positions do not match.

    Example:
        >>> B, T, M, H, K = 2, 3, 4, 2, 8
        >>> q, k = torch.randn(B, T, H, K), torch.randn(B, M + T, H, K)
        >>> r, bias = torch.randn(M + T, H, K), torch.zeros(H, K)
        >>> rel_attention(q, k, k, r, bias, bias).shape
        torch.Size([2, 3, 2, 8])
    """
    T, S = _sizes(q, k, v)
    if r.shape[0] != S:
        raise InputError(f"{S} keys need as many positions, not {r.shape[0]}")
    if attn_len is not None:
        _check_attn_len(attn_len)
        # Keys beyond the reach of the first query are not used.
        unseen = S - T + 1 - attn_len
        if unseen > 0:
            k, v, r = k[:, unseen:], v[:, unseen:], r[unseen:]
            distance_bias = None if distance_bias is None else distance_bias[unseen:]
            first_key = None if first_key is None else (first_key - unseen).clamp(min=0)
    operands = (q, k, v, r, content_bias, position_bias)
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        operands = tuple(x.to(dtype) for x in operands)
        distance_bias = None if distance_bias is None else distance_bias.to(dtype)
    # Each backend controls its precision.
    with torch.autocast(device, enabled=False):
        chosen = choose_backend(q.device, operands[0].dtype, q.shape[3])
        return BACKENDS[chosen.backend](
            *operands,
            distance_bias=distance_bias,
            attn_len=attn_len,
            first_key=first_key,
            dropout=dropout,
        )


def attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S H K"],
    v: Float[Tensor, "B S H K"],
    *,
    attn_len: int | None = None,
    first_key: Int[Tensor, " B"] | Int[Tensor, "B T"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B T H K"]:
    """Attend as :func:`rel_attention` does, with content scores only.

    For absolute positions, which are part of the input, and rotary ones.

    Raises:
        InputError: There are no queries, more queries than keys, or another number of values; or
            ``attn_len`` is below 1.

    Example:
        >>> q, v = torch.ones(1, 2, 1, 4), torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
        >>> attention(q, q, v.expand(q.shape))[0, :, 0, 0]  # itself; the mean of both
        tensor([1., 2.])
    """
    T, S = _sizes(q, k, v)
    if attn_len is not None:
        _check_attn_len(attn_len)
    if attn_len is None and first_key is None and T == S:
        # Without a mask, the hidden half is not computed.
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return out.transpose(1, 2)
    masked_BHTS = reference.masked_keys(T, S, attn_len, q.device)[None, None]
    if first_key is not None:
        masked_BTS = reference.before_first(first_key, 0, S)
        masked_BHTS = masked_BHTS | masked_BTS[:, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=~masked_BHTS, dropout_p=dropout)
    return out.transpose(1, 2)


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Return the numbers of queries and of keys, T and S, of operands that fit."""
    T, S = q.shape[1], k.shape[1]
    if not 0 < T <= S:
        raise InputError(f"{T} queries and {S} keys: the queries must be the last of the keys")
    if v.shape[1] != S:
        raise InputError(f"{S} keys need as many values, not {v.shape[1]}")
    return T, S


def _check_attn_len(attn_len: int) -> None:
    if attn_len < 1:
        raise InputError(f"attn_len={attn_len} must be at least 1: a query sees its own key")


@contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Select the backend of :func:`rel_attention` inside a ``with`` block, for all threads.

    Raises:
        InputError: The backend is unknown.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise InputError(f"backend={backend!r} is unknown; choose from auto, {', '.join(BACKENDS)}")
    global _backend
    before, _backend = _backend, backend
    try:
        yield
    finally:
        _backend = before


class Choice(NamedTuple):
    """The selected backend."""

    backend: str
    """Its name in ``BACKENDS``."""
    reason: str
    """Why it was selected, for display."""


def choose_backend(device: torch.device, dtype: torch.dtype, K: int) -> Choice:
    """Select the backend for a device, precision and head width K."""
    if _backend != "auto":
        return Choice(_backend, "chosen by use_backend")
    against = triton.reason_against(device, dtype, K)
    if against is None:
        return Choice("triton", "fused kernels, forward and backward")
    if torch.compiler.is_compiling():
        return Choice("reference", f"torch.compile fuses the plain operation; {against}")
    return Choice("skew", f"plain PyTorch without a copy for the shift; {against}")
