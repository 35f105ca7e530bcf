"""Relative attention as fused Triton kernels: no scores in memory, forward or backward.

Importing this file does not import Triton, which only some builds of PyTorch bring along; the
kernels are loaded when they are first used. They run on a GPU, or slowly anywhere in Triton's
interpreter (``TRITON_INTERPRET=1``). Every run gives the same bits.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 128
"""Most numbers in a head of which a tile still fits into a multiprocessor."""
DISTANCE_PROGRAMS = 512
"""About how many programs share the gradients of the positions, so that all processors work.

A constant: the order of a sum is not to depend on the machine.
"""


class Blocks(NamedTuple):
    """How a kernel divides its work: powers of two, no more queries than keys, at least 16."""

    queries: int
    keys: int
    warps: int
    stages: int


BLOCKS = {
    ("forward", 2): Blocks(64, 64, 8, 2),
    ("queries", 2): Blocks(64, 64, 8, 2),
    ("keys", 2): Blocks(64, 64, 8, 2),
    ("distances", 2): Blocks(64, 64, 8, 2),
    ("forward", 4): Blocks(32, 32, 8, 2),
    ("queries", 4): Blocks(32, 32, 8, 2),
    ("keys", 4): Blocks(32, 32, 8, 2),
    ("distances", 4): Blocks(32, 32, 8, 2),
}
"""How each kernel divides its work, by the bytes of a number.

Chosen so that what the compiler makes for an H200 keeps nearly all in registers; not yet measured.
"""


def is_supported(device: torch.device, dtype: torch.dtype, K: int) -> bool:
    """Whether the kernels compute heads of this kind here, faster than plain PyTorch."""
    has_gpu = device.type == "cuda" and find_spec("triton") is not None
    # The products of older GPUs are not what the kernels are made for.
    is_recent = has_gpu and torch.cuda.get_device_capability(device) >= (8, 0)
    return is_recent and dtype in DTYPES and K <= WIDEST


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
    """Attend from the segment to the memory and to itself; as the reference does.

    Raises:
        ModuleNotFoundError: Triton is not installed.
        ValueError: The precision, the width of the heads or the device is not one of the kernels'.
    """
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
    operands = (_dense_rows(x) for x in (q, k, v, r))
    biases = (content_bias.contiguous(), position_bias.contiguous())
    if distance_bias is not None:
        distance_bias = distance_bias.contiguous()
    seed = None
    if dropout:
        # On the device: nobody waits for it, and a graph draws a new one each time it is replayed.
        seed = torch.randint(2**62, (1,), device=q.device)
    attended = _TritonAttention.apply(
        *operands, *biases, distance_bias, first_key, seed, attn_len, dropout
    )
    return cast(Tensor, attended)


def _is_interpreted() -> bool:
    return bool(import_module("triton").knobs.runtime.interpret)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        r: Tensor,
        content_bias: Tensor,
        position_bias: Tensor,
        distance_bias: Tensor | None,
        first_key: Tensor | None,
        seed: Tensor | None,
        attn_len: int | None,
        dropout: float,
    ) -> Tensor:
        from transformer_xl.ops import triton_forward

        B, T, H, _ = q.shape
        inputs = (q, k, v, r, content_bias, position_bias, distance_bias, first_key, seed)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        norms = torch.empty(B, H, 2, T, dtype=torch.float32, device=q.device)
        blocks = BLOCKS["forward", q.element_size()]
        programs = -(-T // blocks.queries) * B * H
        with torch.cuda.device_of(q):
            triton_forward.attention_kernel[programs,](
                *inputs, out, norms, **_arguments(inputs, attn_len, dropout, blocks)
            )
        ctx.save_for_backward(*inputs, out, norms)
        ctx.attn_len, ctx.dropout = attn_len, dropout
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        *inputs, out, norms = ctx.saved_tensors
        needed = ctx.needs_input_grad
        d_out = _dense_rows(grad_outputs[0])
        dk = dv = dr = d_distance_bias = None
        with torch.cuda.device_of(out):
            dq, d_biases, back = _query_gradients(ctx, inputs, out, d_out, norms)
            if needed[1] or needed[2]:
                dk, dv = _key_gradients(ctx, inputs, d_out, norms, back)
            if needed[3] or needed[6]:
                dr, d_distance_bias = _distance_gradients(ctx, inputs, d_out, norms, back)
        return dq, dk, dv, dr, *d_biases, d_distance_bias, None, None, None, None


def _query_gradients(
    ctx: Any, inputs: list[Tensor | None], out: Tensor, d_out: Tensor, norms: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries and of both biases, and what the other kernels need."""
    from transformer_xl.ops import triton_backward

    B, T, H, K = out.shape
    blocks = BLOCKS["queries", out.element_size()]
    n_blocks = -(-T // blocks.queries)
    dq, back = torch.empty_like(out), norms.new_empty(B, H, T)
    shares = norms.new_empty(B, n_blocks, 2, H, K)
    triton_backward.query_kernel[n_blocks * B * H,](
        *(*inputs, out, d_out, norms, back, dq, shares),
        **_arguments(inputs, ctx.attn_len, ctx.dropout, blocks, d_out),
    )
    return dq, shares.sum((0, 1)).to(out.dtype), back


def _key_gradients(
    ctx: Any, inputs: list[Tensor | None], d_out: Tensor, norms: Tensor, back: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of keys and values."""
    from transformer_xl.ops import triton_backward

    B, S, H, _ = cast(Tensor, inputs[1]).shape
    blocks = BLOCKS["keys", d_out.element_size()]
    dk, dv = d_out.new_empty(2, *cast(Tensor, inputs[1]).shape)
    triton_backward.key_kernel[-(-S // blocks.keys) * B * H,](
        *(*inputs, d_out, norms, back, dk, dv),
        **_arguments(inputs, ctx.attn_len, ctx.dropout, blocks, d_out),
    )
    return dk, dv


def _distance_gradients(
    ctx: Any, inputs: list[Tensor | None], d_out: Tensor, norms: Tensor, back: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of positions and of the biases of the distances."""
    from transformer_xl.ops import triton_backward

    r, distance_bias = cast(Tensor, inputs[3]), inputs[6]
    B, T = d_out.shape[:2]
    S, H, K = r.shape
    blocks = BLOCKS["distances", d_out.element_size()]
    n_chunks = -(-(S + -T % blocks.queries) // blocks.keys)
    # Streams are summed in groups of a fixed size, and the groups in a fixed order.
    group_size = max(1, B * n_chunks * H // DISTANCE_PROGRAMS)
    n_groups = -(-B // group_size)
    dr = norms.new_empty(n_groups, S, H, K)
    d_distance_bias = None if distance_bias is None else norms.new_empty(n_groups, S, H)
    triton_backward.distance_kernel[n_chunks, H, n_groups](
        *(*inputs, d_out, norms, back, dr, d_distance_bias),
        B=B,
        group_size=group_size,
        **_arguments(inputs, ctx.attn_len, ctx.dropout, blocks, d_out),
    )
    if d_distance_bias is not None:
        d_distance_bias = d_distance_bias.sum(0).to(r.dtype)
    return dr.sum(0).to(r.dtype), d_distance_bias


def _arguments(
    inputs: Any,
    attn_len: int | None,
    dropout: float,
    blocks: Blocks,
    d_out: Tensor | None = None,
) -> dict[str, Any]:
    """Collect what all kernels are told about their tensors."""
    q, k, v, r, _, _, distance_bias, first_key, _ = inputs
    T, H, K = q.shape[1:]
    S = k.shape[1]
    strided = {"q": q, "k": k, "v": v} | ({} if d_out is None else {"d": d_out})
    strides = {
        f"{name}_{axis}": x.stride(n)
        for name, x in strided.items()
        for n, axis in enumerate(("stream", "row", "head"))
    }
    is_exact = q.dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision != "tf32"
    return strides | {
        "r_row": r.stride(0),
        "r_head": r.stride(1),
        "T": T,
        "S": S,
        "H": H,
        "attn_len": S if attn_len is None else min(attn_len, S),
        "scale": K**-0.5,
        "dropout": dropout,
        "kept_scale": 1 / (1 - dropout) if dropout < 1 else 0.0,
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
        # Wide heads would not leave room for the tiles of the next turn.
        "num_stages": blocks.stages if K <= 64 else 1,
    }
