"""Relative attention as fused Triton kernels, which never write scores to memory.

Importing this module does not import Triton, which only some builds of PyTorch include; the kernels
are loaded on first use. They run on a GPU, or in Triton's interpreter (``TRITON_INTERPRET=1``).
Results are deterministic for a GPU model.

Each launch is a custom operator, which ``torch.compile`` does not trace.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.library import custom_op

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 128
"""Maximum head width whose tiles fit into a multiprocessor."""
DISTANCE_PROGRAMS = 512
"""Approximate number of programs for the gradients of positions, to occupy all multiprocessors.

A constant and not the number of multiprocessors, on which the order of summation must not depend.
"""


class Blocks(NamedTuple):
    """Launch parameters of a kernel; block sizes are powers of two, 16 <= queries <= keys."""

    queries: int
    keys: int
    warps: int
    stages: int


BLOCKS = {
    ("forward", 2, 64): Blocks(64, 64, 4, 2),
    ("forward", 2, 128): Blocks(64, 64, 4, 1),
    ("forward", 4, 64): Blocks(32, 32, 8, 2),
    ("forward", 4, 128): Blocks(16, 16, 8, 1),
    ("queries", 2, 64): Blocks(64, 64, 4, 2),
    ("queries", 2, 128): Blocks(64, 64, 4, 2),
    ("queries", 4, 64): Blocks(32, 32, 8, 2),
    ("queries", 4, 128): Blocks(16, 16, 8, 1),
    ("keys", 2, 64): Blocks(64, 64, 4, 1),
    ("keys", 2, 128): Blocks(64, 64, 8, 1),
    ("keys", 4, 64): Blocks(32, 32, 8, 2),
    ("keys", 4, 128): Blocks(16, 16, 8, 1),
    ("distances", 2, 64): Blocks(64, 64, 4, 1),
    ("distances", 2, 128): Blocks(64, 64, 8, 1),
    ("distances", 4, 64): Blocks(32, 32, 8, 2),
    ("distances", 4, 128): Blocks(16, 16, 8, 1),
}
"""Launch parameters by kernel, bytes of an element and maximum head width.

Chosen for the fewest H100 instructions per pair of query and key, which
``benchmarks/gpu/resources.py`` counts without a GPU; not yet measured.
"""
BEFORE_HOPPER = {
    ("forward", 2, 128): Blocks(32, 64, 4, 2),
    ("queries", 2, 64): Blocks(32, 64, 4, 2),
    ("queries", 2, 128): Blocks(32, 64, 4, 2),
    ("keys", 2, 64): Blocks(64, 64, 4, 2),
    ("keys", 2, 128): Blocks(32, 64, 8, 1),
    ("distances", 2, 128): Blocks(32, 64, 4, 1),
}
"""Overrides for GPUs before Hopper, such as an A100, on which the kernels have fewer registers."""


def reason_against(device: torch.device, dtype: torch.dtype, K: int) -> str | None:
    """Return why the kernels cannot be used, for display; None: they can."""
    if device.type != "cuda":
        return f"the fused kernels are for a GPU, not for {device.type}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    # The kernels rely on tensor cores of Ampere or later.
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"the GPU's compute capability {capability[0]}.{capability[1]} is below 8.0"
    if dtype not in DTYPES:
        return f"the fused kernels do not compute {dtype}"
    return None if K <= WIDEST else f"heads of width {K} are wider than {WIDEST}"


# As torch.compiler.assume_constant_result does, but without importing the compiler.
setattr(reason_against, "_dynamo_marked_constant", True)  # noqa: B010


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
    """Attend from the segment to the memory and to itself; as the reference does.

    Raises:
        ModuleNotFoundError: Triton is not installed.
        ValueError: The kernels do not support the dtype, head width or device.
    """
    q, k, v, r = (_dense_rows(x) for x in (q, k, v, r))
    biases = (content_bias, position_bias, distance_bias)
    biases = [None if x is None else x.contiguous() for x in biases]
    if first_key is not None and first_key.ndim == 1:
        first_key = first_key[:, None].expand(-1, q.shape[1])
    seed = None
    if dropout:
        # On the device, without synchronization, and redrawn at each replay of a CUDA graph.
        seed = torch.randint(2**62, (1,), device=q.device)
    S = k.shape[1]
    attn_len = S if attn_len is None else min(attn_len, S)
    return _attend(q, k, v, r, *biases, first_key, seed, attn_len, dropout)[0]


def _check(q: Tensor, k: Tensor, v: Tensor, r: Tensor) -> None:
    if find_spec("triton") is None:
        raise ModuleNotFoundError(
            "the triton backend needs Triton, which comes with PyTorch for CUDA; "
            "choose another backend, or: pip install triton",
            name="triton",
        )
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype == r.dtype:
        raise ValueError(
            f"{q.dtype} queries, {k.dtype} keys, {v.dtype} values and {r.dtype} positions: "
            "the triton backend computes float16, bfloat16 or float32, the same in all"
        )
    if q.shape[3] > WIDEST:
        raise ValueError(
            f"heads of width {q.shape[3]}: the triton backend computes up to {WIDEST}; "
            "choose the skew backend"
        )
    if q.device.type != "cuda" and not _is_interpreted():
        raise ValueError(
            f"tensors on {q.device}: the triton backend needs a CUDA device; choose another "
            "backend, or set TRITON_INTERPRET=1 before the start to test the kernels"
        )


@cache
def _is_interpreted() -> bool:
    return bool(import_module("triton").knobs.runtime.interpret)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


_OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor r, Tensor content_bias, Tensor position_bias, "
    "Tensor? distance_bias, Tensor? first_key, Tensor? seed, int attn_len, float dropout"
)


@custom_op(
    "transformer_xl::rel_attention", mutates_args=(), schema=f"({_OPERANDS}) -> (Tensor, Tensor)"
)
def _attend(*operands: Any) -> tuple[Tensor, Tensor]:
    """Return the attended values, and the softmax statistics for the backward pass."""
    _check(*operands[:4])
    from transformer_xl.ops import triton_forward

    q = operands[0]
    out, norms = _like_attended(*operands)
    blocks = _blocks("forward", q)
    programs = -(-q.shape[1] // blocks.queries) * q.shape[0] * q.shape[2]
    with torch.cuda.device_of(q):
        triton_forward.attention_kernel[programs,](
            *operands[:9], out, norms, **_arguments(operands, blocks)
        )
    return out, norms


@_attend.register_fake
def _like_attended(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(B, H, 2, T, dtype=torch.float32)


@custom_op(
    "transformer_xl::rel_attention_d_queries",
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor norms, Tensor out, {_OPERANDS}) -> (Tensor, Tensor, Tensor)",
)
def _query_gradients(
    d_out: Tensor, norms: Tensor, out: Tensor, *operands: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries and biases, and the softmax term of the other kernels."""
    from transformer_xl.ops import triton_backward

    B, T, H, K = out.shape
    blocks = _blocks("queries", out)
    n_blocks = -(-T // blocks.queries)
    dq, back = torch.empty_like(out), norms.new_empty(B, H, T)
    shares = norms.new_empty(B, n_blocks, 2, H, K)
    with torch.cuda.device_of(out):
        triton_backward.query_kernel[n_blocks * B * H,](
            *(*operands[:9], out, d_out, norms, back, dq, shares),
            **_arguments(operands, blocks, d_out),
        )
    return dq, shares.sum((0, 1)).to(out.dtype), back


@_query_gradients.register_fake
def _(d_out: Tensor, norms: Tensor, out: Tensor, *operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    B, T, H, K = out.shape
    return torch.empty_like(out), out.new_empty(2, H, K), norms.new_empty(B, H, T)


@custom_op(
    "transformer_xl::rel_attention_d_keys",
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor norms, Tensor back, {_OPERANDS}) -> (Tensor, Tensor)",
)
def _key_gradients(
    d_out: Tensor, norms: Tensor, back: Tensor, *operands: Any
) -> tuple[Tensor, Tensor]:
    """Return the gradients of keys and values."""
    from transformer_xl.ops import triton_backward

    dk, dv = _like_keys(d_out, norms, back, *operands)
    B, S, H, _ = dk.shape
    blocks = _blocks("keys", d_out)
    with torch.cuda.device_of(d_out):
        triton_backward.key_kernel[-(-S // blocks.keys) * B * H,](
            *(*operands[:9], d_out, norms, back, dk, dv), **_arguments(operands, blocks, d_out)
        )
    return dk, dv


@_key_gradients.register_fake
def _like_keys(d_out: Tensor, norms: Tensor, back: Tensor, *operands: Any) -> tuple[Tensor, Tensor]:
    k = operands[1]
    return k.new_empty(k.shape), k.new_empty(k.shape)


@custom_op(
    "transformer_xl::rel_attention_d_positions",
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor norms, Tensor back, {_OPERANDS}) -> (Tensor, Tensor)",
)
def _distance_gradients(
    d_out: Tensor, norms: Tensor, back: Tensor, *operands: Any
) -> tuple[Tensor, Tensor]:
    """Return the gradients of positions and distance biases (empty without any)."""
    from transformer_xl.ops import triton_backward

    r, distance_bias = operands[3], operands[6]
    B, T = d_out.shape[:2]
    S, H, K = r.shape
    blocks = _blocks("distances", d_out)
    n_chunks = -(-(S + -T % blocks.queries) // blocks.keys)
    # Streams are summed in groups of a fixed size, and the groups in a fixed order.
    group_size = max(1, B * n_chunks * H // DISTANCE_PROGRAMS)
    n_groups = -(-B // group_size)
    dr = norms.new_empty(n_groups, S, H, K)
    d_bias = norms.new_empty(n_groups, 0 if distance_bias is None else S, H)
    with torch.cuda.device_of(d_out):
        triton_backward.distance_kernel[n_chunks, H, n_groups](
            *(*operands[:9], d_out, norms, back, dr, d_bias),
            B=B,
            group_size=group_size,
            **_arguments(operands, blocks, d_out),
        )
    return dr.sum(0).to(r.dtype), d_bias.sum(0).to(r.dtype)


@_distance_gradients.register_fake
def _(d_out: Tensor, norms: Tensor, back: Tensor, *operands: Any) -> tuple[Tensor, Tensor]:
    r, distance_bias = operands[3], operands[6]
    rows = 0 if distance_bias is None else r.shape[0]
    return r.new_empty(r.shape), r.new_empty(rows, r.shape[1])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.attn_len, ctx.dropout = inputs
    ctx.save_for_backward(*output, *tensors)
    # The norms have no gradient; do not allocate zeros for it.
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    out, norms, *tensors = ctx.saved_tensors
    operands = (*tensors, ctx.attn_len, ctx.dropout)
    d_out, needed = _dense_rows(d_out), ctx.needs_input_grad
    dk = dv = dr = d_bias = None
    dq, d_biases, back = _query_gradients(d_out, norms, out, *operands)
    if needed[1] or needed[2]:
        dk, dv = _key_gradients(d_out, norms, back, *operands)
    if needed[3] or needed[6]:
        dr, d_bias = _distance_gradients(d_out, norms, back, *operands)
    d_bias = d_bias if needed[6] else None
    return dq, dk, dv, dr, d_biases[0], d_biases[1], d_bias, None, None, None, None


_attend.register_autograd(_gradients, setup_context=_remember)


def _blocks(kernel: str, x: Tensor) -> Blocks:
    key = kernel, x.element_size(), 64 if x.shape[3] <= 64 else 128
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (9, 0):
        return BEFORE_HOPPER.get(key, BLOCKS[key])
    return BLOCKS[key]


def _arguments(
    operands: tuple[Any, ...], blocks: Blocks, d_out: Tensor | None = None
) -> dict[str, Any]:
    """Collect the arguments that all kernels share."""
    q, k, v, r, _, _, distance_bias, first_key, _, attn_len, dropout = operands
    T, H, K = q.shape[1:]
    strided = {"q": q, "k": k, "v": v} | ({} if d_out is None else {"d": d_out})
    strides = {}
    for name, x in strided.items():
        strides[name + "_stream"], strides[name + "_row"], strides[name + "_head"], _ = x.stride()
    # Scaled by the probability rounded to 16 bits, so that the expectation is exact.
    dropped = round(65536 * dropout)
    is_exact = q.dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision != "tf32"
    return strides | {
        "r_row": r.stride(0),
        "r_head": r.stride(1),
        "first_stream": 0 if first_key is None else first_key.stride(0),
        "first_row": 0 if first_key is None else first_key.stride(1),
        "T": T,
        "S": k.shape[1],
        "H": H,
        "attn_len": attn_len,
        "scale": K**-0.5,
        "dropped_of_65536": dropped,
        "kept_scale": 65536 / (65536 - dropped) if dropped < 65536 else 0.0,
        "K": K,
        "WIDTH": max(16, 1 << (K - 1).bit_length()),
        "BLOCK_T": blocks.queries,
        "BLOCK_S": blocks.keys,
        "HAS_BIAS": distance_bias is not None,
        "HAS_FIRST": first_key is not None,
        "DROPS": dropout > 0,
        "PRECISION": "ieee" if is_exact else "tf32",
        "UPCAST": q.dtype == torch.bfloat16 and _is_interpreted(),
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }
