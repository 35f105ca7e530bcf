"""Relative attention as fused Triton kernels.

Importing this module does not import Triton, which only some builds of PyTorch include; the kernels
are loaded on first use. They run on a GPU, or in Triton's interpreter (``TRITON_INTERPRET=1``).
Results are deterministic for a GPU model.

The forward pass writes no scores to memory. The backward pass writes the weights and, twice, the
gradients of the scores: three matrices of B H T S numbers, for one layer at a time. Both are custom
operators, which ``torch.compile`` does not trace; a decoding step (:func:`attend_step`) is not.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.library import custom_op

from transformer_xl.errors import InputError
from transformer_xl.ops.context import Context

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 128
"""Maximum head width whose tiles fit into a multiprocessor."""

SHARED_FROM = 8
"""Number of streams from which a step computes the position term of all of them as one product."""


class Blocks(NamedTuple):
    """Launch parameters of a kernel; block sizes are powers of two, 16 <= queries <= keys."""

    queries: int
    keys: int
    warps: int
    stages: int


class StepBlocks(NamedTuple):
    """Launch parameters of the kernel of a decoding step."""

    slots: int
    """Slots of the ring in a block, a power of two."""
    warps: int
    is_ahead: bool
    """Whether a block is loaded before the one before it is read, which takes more registers."""


STEP_BLOCKS = {"few": StepBlocks(256, 8, False), "many": StepBlocks(64, 2, False)}
"""Launch parameters of a decoding step of few or many streams and heads.

Of ``many``, 64 slots were the fastest of three; ``benchmarks/gpu/tune_step.py`` tries others."""

BLOCKS = {
    ("forward", 2, 64): Blocks(64, 64, 4, 3),
    ("forward", 2, 128): Blocks(64, 64, 4, 1),
    ("forward", 4, 64): Blocks(32, 32, 8, 2),
    ("forward", 4, 128): Blocks(16, 16, 8, 1),
    ("backward", 2, 64): Blocks(64, 64, 4, 3),
    ("backward", 2, 128): Blocks(64, 64, 8, 1),
    ("backward", 4, 64): Blocks(32, 32, 8, 2),
    ("backward", 4, 128): Blocks(16, 16, 8, 1),
}
"""Launch parameters by kernel, bytes of an element and maximum head width.

Those of 2 bytes and width 64 were the fastest of nine (forward) and eight (backward) on an H200;
the others were chosen for the fewest H100 instructions per pair of query and key, which
``benchmarks/gpu/resources.py`` counts without a GPU.
"""
BEFORE_HOPPER = {
    ("forward", 2, 128): Blocks(32, 64, 4, 2),
    ("backward", 2, 64): Blocks(32, 64, 4, 2),
    ("backward", 2, 128): Blocks(32, 64, 4, 1),
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
        InputError: The kernels do not support the dtype, head width or device.
    """
    k, v, r = (_dense_rows(x) for x in (k, v, r))
    # Added here: a kernel keeps what it loads in shared memory, but sums it makes in registers,
    # which ptxas 12.8 overwrote. By heads, as the products of the backward pass read them.
    by_content = (q + content_bias.to(q.dtype)).transpose(1, 2).contiguous()
    by_position = (q + position_bias.to(q.dtype)).permute(2, 0, 1, 3).contiguous()
    if torch.is_grad_enabled():
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
    distance_bias = None if distance_bias is None else distance_bias.contiguous()
    if first_key is not None and first_key.ndim == 1:
        first_key = first_key[:, None].expand(-1, q.shape[1])
    seed = None
    if dropout:
        # On the device, without synchronization, and redrawn at each replay of a CUDA graph.
        seed = torch.randint(2**62, (1,), device=q.device)
    S = k.shape[1]
    attn_len = S if attn_len is None else min(attn_len, S)
    operands = (by_content, by_position, k, v, r, distance_bias, first_key, seed)
    return _attend(*operands, attn_len, dropout)[0]


def attend_step(
    q: Float[Tensor, "B 1 H K"],
    k: Float[Tensor, "B 1 H K"],
    v: Float[Tensor, "B 1 H K"],
    keys: Float[Tensor, "H B capacity K"],
    values: Float[Tensor, "H B capacity K"],
    r: Float[Tensor, "capacity H K"],
    content_bias: Float[Tensor, "H K"],
    position_bias: Float[Tensor, "H K"],
    *,
    distance_bias: Float[Tensor, "capacity H"] | None = None,
    newest: Int[Tensor, " 1"],
    n_seen: Int[Tensor, " B"],
) -> Float[Tensor, "B 1 H K"]:
    """Write the key and value of a token of each stream into their ring, and attend to the ring.

    Args:
        q: Queries.
        k: Keys of the tokens.
        v: Values of the tokens.
        keys: Keys of the ring, in which slot ``newest`` is replaced.
        values: Values of the ring.
        r: Projected position encodings, farthest first.
        content_bias: The bias ``u``.
        position_bias: The bias ``v``.
        distance_bias: Added to the scores of each distance, in the order of ``r``. None: nothing.
        newest: The slot of the tokens; those before it, around the ring, are the tokens before.
        n_seen: How many keys a stream sees, its own included.

    Raises:
        ModuleNotFoundError: Triton is not installed.
        InputError: The kernel does not support the dtype, head width or device.
    """
    _check(q, keys, values, r)
    from transformer_xl.ops import triton_step

    H, B, capacity, K = keys.shape
    # With few programs each takes more threads.
    blocks = STEP_BLOCKS["few" if B * H <= 128 else "many"]
    q, k, v, r = (_dense_rows(x) for x in (q, k, v, r))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if has_scores := B >= SHARED_FROM:
        # One product, so that the streams do not each read the positions.
        by_position = (q[:, 0] + position_bias).to(r.dtype).transpose(0, 1)
        r = by_position @ r.permute(1, 2, 0)
    with torch.cuda.device_of(q):
        triton_step.step_kernel[B * H,](
            *(q, k, v, keys, values, r, content_bias.contiguous(), position_bias.contiguous()),
            *(None if distance_bias is None else distance_bias.contiguous(), newest, n_seen, out),
            *(x.stride(n) for x in (q, k, v) for n in (0, 2)),
            *(H, B, capacity, r.stride(0), r.stride(1), K**-0.5),
            K=K,
            WIDTH=max(16, 1 << (K - 1).bit_length()),
            BLOCK=blocks.slots,
            HAS_BIAS=distance_bias is not None,
            HAS_SCORES=has_scores,
            IS_AHEAD=blocks.is_ahead,
            num_warps=blocks.warps,
        )
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, r: Tensor) -> None:
    if find_spec("triton") is None:
        raise ModuleNotFoundError(
            "the triton backend needs Triton, which comes with PyTorch for CUDA; "
            "choose another backend, or: pip install triton",
            name="triton",
        )
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype == r.dtype:
        raise InputError(
            f"{q.dtype} queries, {k.dtype} keys, {v.dtype} values and {r.dtype} positions: "
            "the triton backend computes float16, bfloat16 or float32, the same in all"
        )
    if q.shape[3] > WIDEST:
        raise InputError(
            f"heads of width {q.shape[3]}: the triton backend computes up to {WIDEST}; "
            "choose the skew backend"
        )
    if q.device.type != "cuda" and not _is_interpreted():
        raise InputError(
            f"tensors on {q.device}: the triton backend needs a CUDA device; choose another "
            "backend, or set TRITON_INTERPRET=1 before the start to test the kernels"
        )


@cache
def _is_interpreted() -> bool:
    return bool(import_module("triton").knobs.runtime.interpret)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


_OPERANDS = (
    "Tensor by_content, Tensor by_position, Tensor k, Tensor v, Tensor r, "
    "Tensor? distance_bias, Tensor? first_key, Tensor? seed, SymInt attn_len, float dropout"
)


@custom_op(
    "transformer_xl::rel_attention", mutates_args=(), schema=f"({_OPERANDS}) -> (Tensor, Tensor)"
)
def _attend(*operands: Any) -> tuple[Tensor, Tensor]:
    """Return the attended values, and the softmax statistics for the backward pass."""
    _check(*operands[1:5])
    from transformer_xl.ops import triton_forward

    by_content = operands[0]
    B, H, T, _ = by_content.shape
    out, norms = _like_attended(*operands)
    blocks = _blocks("forward", by_content)
    with torch.cuda.device_of(by_content):
        triton_forward.attention_kernel[-(-T // blocks.queries) * B * H,](
            *operands[:8], out, norms, **_kernel_arguments(operands, blocks)
        )
    return out, norms


@_attend.register_fake
def _like_attended(by_content: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    B, H, T, K = by_content.shape
    return by_content.new_empty(B, T, H, K), by_content.new_empty(B, H, 2, T, dtype=torch.float32)


@custom_op(
    "transformer_xl::rel_attention_gradients",
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor norms, Tensor out, {_OPERANDS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _gradients_of(
    d_out: Tensor, norms: Tensor, out: Tensor, *operands: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the operands that have one; that of no distance bias is empty."""
    from transformer_xl.ops import triton_backward

    by_content, by_position, k, _, r, distance_bias, first_key = operands[:7]
    B, H, T, K = by_content.shape
    S = r.shape[0]
    blocks = _blocks("backward", by_content)
    # Rows begin at multiples of the vectors in which memory is stored and read.
    width = -(-S // 16) * 16
    d_by_head = torch.empty_like(by_content)
    weights, d_scores = (by_content.new_empty(B, H, T, width)[..., :S] for _ in range(2))
    d_turned = by_content.new_empty(H, B * T, width)[..., :S]
    with torch.cuda.device_of(by_content):
        triton_backward.gradient_kernel[-(-T // blocks.queries) * B * H,](
            *(*operands[:8], out, d_out, norms, d_by_head, weights, d_scores, d_turned),
            matrix_row=width,
            **_kernel_arguments(operands, blocks, d_out),
        )
    k, r = _cleared_unseen(k, r, T, first_key, operands[8])
    dv, dk = weights.mT @ d_by_head, d_scores.mT @ by_content
    d_content = d_scores @ k.transpose(1, 2)
    # All streams in one product.
    dr = d_turned.mT @ by_position.flatten(1, 2)
    d_position = (d_turned @ r.transpose(0, 1)).view(H, B, T, K)
    d_bias = r.new_empty(0, H)
    if distance_bias is not None:
        d_bias = d_turned.sum(1, dtype=torch.float32).to(r.dtype).T
    dk, dv, dr = dk.transpose(1, 2), dv.transpose(1, 2), dr.transpose(0, 1)
    return d_content, d_position, dk, dv, dr, d_bias


def _cleared_unseen(
    k: Tensor, r: Tensor, T: int, first_key: Tensor | None, attn_len: int
) -> tuple[Tensor, Tensor]:
    """Clear the keys and positions that no query reaches, which may hold anything."""
    S = len(r)
    if first_key is None and attn_len == S:
        return k, r
    place = torch.arange(S, device=r.device)
    r = r.where((place >= S - attn_len)[:, None, None], 0)
    first = place[S - T :] + 1 - attn_len
    first = (first if first_key is None else first_key.maximum(first)).amin(-1, keepdim=True)
    return k.where((place >= first)[..., None, None], 0), r


@_gradients_of.register_fake
def _(
    d_out: Tensor, norms: Tensor, out: Tensor, *operands: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    by_content, by_position, _, _, r, distance_bias = operands[:6]
    B, H, _, K = by_content.shape
    S = r.shape[0]
    dk, dv = (out.new_empty(B, H, S, K).transpose(1, 2) for _ in range(2))
    dr, d_bias = r.new_empty(H, S, K).transpose(0, 1), r.new_empty(0, H)
    if distance_bias is not None:
        d_bias = r.new_empty(H, S).T
    return torch.empty_like(by_content), torch.empty_like(by_position), dk, dv, dr, d_bias


def _remember(ctx: Context, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, attn_len, dropout = inputs
    ctx.settings = attn_len, dropout
    ctx.save_for_backward(*output, *tensors)
    # The norms have no gradient; do not allocate zeros for it.
    ctx.set_materialize_grads(False)


def _gradients(ctx: Context, d_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    out, norms, *tensors = ctx.saved_tensors
    operands = (*tensors, *ctx.settings)
    *gradients, d_bias = _gradients_of(_dense_rows(d_out), norms, out, *operands)
    return *gradients, d_bias if ctx.needs_input_grad[5] else None, None, None, None, None


_attend.register_autograd(_gradients, setup_context=_remember)


def _blocks(kernel: str, x: Tensor) -> Blocks:
    key = kernel, x.element_size(), 64 if x.shape[3] <= 64 else 128
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (9, 0):
        return BEFORE_HOPPER.get(key, BLOCKS[key])
    return BLOCKS[key]


def _kernel_arguments(
    operands: tuple, blocks: Blocks, d_out: Tensor | None = None
) -> dict[str, object]:
    """Return what both kernels take by name: strides, sizes, constants and launch parameters.

    Strides are in elements. The kernels have no argument for that of the last dimension, of width
    K: it must be 1 in all tensors (:func:`_dense_rows`).

    Args:
        operands: The operands of the custom operators, in the order of :data:`_OPERANDS`.
        blocks: Launch parameters of the kernel.
        d_out: Gradient of the output, (B, T, H, K), of which the backward kernel takes the strides.
            None: the forward kernel.
    """
    by_content, _, k, v, r, distance_bias, first_key, _, attn_len, dropout = operands
    B, H, T, K = by_content.shape
    tensors = {"k": k, "v": v} if d_out is None else {"k": k, "v": v, "d_out": d_out}
    strides = {}
    for name, x in tensors.items():
        strides[f"{name}_stream"], strides[f"{name}_row"], strides[f"{name}_head"], _ = x.stride()
    # Scaled by the probability rounded to 16 bits, so that the expectation is exact.
    dropped = round(65536 * dropout)
    is_exact = k.dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision != "tf32"
    return strides | {
        "r_row": r.stride(0),
        "r_head": r.stride(1),
        "first_stream": 0 if first_key is None else first_key.stride(0),
        "first_row": 0 if first_key is None else first_key.stride(1),
        "B": B,
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
        "UPCAST": k.dtype == torch.bfloat16 and _is_interpreted(),
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }
