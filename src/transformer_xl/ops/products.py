"""Matrix products by what is fastest for them on a CPU.

torch uses MKL for float32 products, which reaches less than half of the peak on CPUs that are not
Intel's (AMD Zen 5: 200 instead of 450 GFLOP/s). oneDNN, which torch also includes, reaches it in
the same precision. For small products its overhead is larger than the gain.

Processors that only emulate bfloat16 multiply its numbers in float32.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from threading import Lock
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from transformer_xl.ops import native
from transformer_xl.ops.context import Context
from transformer_xl.ops.packed import PackedWeight

LEAST_WORK = 1 << 22
"""Minimum multiplications of a product for oneDNN."""
LEAST_ROWS = 32
"""Minimum rows for oneDNN: products of few rows are bound by memory bandwidth."""

_setting_lock = Lock()
_setting_users: list[None] = []
_setting_before: list[str] = []


def linear(
    x: Float[Tensor, "*batch E"],
    weight: Float[Tensor, "F E"] | PackedWeight,
    bias: Float[Tensor, " F"] | None,
) -> Float[Tensor, "*batch F"]:
    """Return ``x weight^T + bias``, as :func:`torch.nn.functional.linear` does."""
    if isinstance(weight, PackedWeight):
        if not native.multiplies(x, weight):
            return weight.product(x, bias)
        rows = native.product(x.reshape(-1, x.shape[-1]), weight, bias)
        return rows.view(*x.shape[:-1], -1)
    # The dtype to which autocast casts the operands; those in float64 it leaves alone.
    is_cast = x.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    is_cast &= torch.float64 not in (x.dtype, weight.dtype)
    dtype = torch.get_autocast_dtype("cpu") if is_cast else None
    is_large = takes_onednn(x, weight)
    has_graph = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    # Where a precision is emulated, autocast must not choose it for the product.
    is_widened = dtype is not None and emulates(dtype, x.device.type)
    if (has_graph and (is_large or dtype is not None)) or is_widened:
        with torch.autocast(x.device.type, enabled=False):
            return cast(Tensor, _Linear.apply(x, weight, bias, dtype))
    return _linear(x, weight, bias)


class Linear(nn.Linear):
    """A linear map whose forward pass is the faster product of this package."""

    def forward(
        self, input: Float[Tensor, "*batch E"], *, first_row: int = 0
    ) -> Float[Tensor, "*batch rows"]:
        """Multiply by the weights, or by the rows of them from ``first_row`` on."""
        weight = self.weight[first_row:] if first_row else self.weight
        return linear(input, weight, self.bias)


def product(
    a: Float[Tensor, "rows inner"],
    b: Float[Tensor, "inner F"],
    bias: Float[Tensor, " F"] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``a @ b + bias``, without autograd."""
    if emulates(a.dtype, a.device.type):
        result = product(a.float(), b.float(), None if bias is None else bias.float())
        return result.to(a.dtype) if out is None else out.copy_(result)
    if out is None and a.is_contiguous():
        return _linear(a, b.T, bias)
    with onednn(takes_onednn(a, b.T)):
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)


def add_product(
    total: Float[Tensor, "rows F"], a: Float[Tensor, "rows inner"], b: Float[Tensor, "inner F"]
) -> None:
    """Add ``a @ b`` to ``total``, without autograd."""
    if total.dtype != a.dtype or emulates(a.dtype, a.device.type):
        total += product(a, b)
        return
    with onednn(takes_onednn(a, b.T)):
        total.addmm_(a, b)


def takes_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether a product by the transposed ``weight`` uses oneDNN."""
    if torch.compiler.is_compiling():
        # Before the comparisons below, which would specialize dynamic sizes.
        return False
    rows = x.numel() // max(x.shape[-1], 1)
    return (
        rows >= LEAST_ROWS
        and rows * weight.numel() >= LEAST_WORK
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and onednn_is_faster()
    )


@contextmanager
def onednn(is_used: bool) -> Iterator[None]:
    """Use oneDNN for products inside a ``with`` block. Without AVX-512, torch ignores it.

    The only setting with which torch does so also permits bfloat16 internally. CPUs with AMX would
    use that, so they are excluded; all others compute in float32 (measured: the same errors against
    float64).
    """
    if not is_used:
        yield
        return
    setting = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    with _setting_lock:
        # The setting is global: the first user changes it, the last one restores it.
        if not _setting_users:
            _setting_before.append(setting.fp32_precision)
            setting.fp32_precision = "bf16"
        _setting_users.append(None)
    try:
        yield
    finally:
        with _setting_lock:
            _setting_users.pop()
            if not _setting_users:
                setting.fp32_precision = _setting_before.pop()


def fast_batches(x: Float[Tensor, "*batch T K"]) -> AbstractContextManager[None]:
    """Use the fastest library for batched products of matrices like ``x`` in a ``with`` block."""
    return onednn(batches_take_onednn(x))


def batches_take_onednn(x: Float[Tensor, "*batch T K"]) -> bool:
    """Whether oneDNN is the fastest for batched products of matrices like ``x``."""
    return (
        x.device.type == "cpu"
        and x.shape[-2] >= LEAST_ROWS
        and not torch.compiler.is_compiling()
        and onednn_is_faster()
        # With AVX2, torch's fused kernel, which uses MKL, is faster.
        and _has_avx512()
        and (x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and has_bfloat16()))
    )


def emulates(dtype: torch.dtype, device: str) -> bool:
    """Whether a type of device only emulates products in a precision.

    They take up to a hundred times as long as in float32, so the operands are widened to float32.
    """
    return (
        dtype == torch.bfloat16
        and device == "cpu"
        and not torch.compiler.is_compiling()
        and not has_bfloat16()
    )


@cache
def has_bfloat16() -> bool:
    """Whether oneDNN has products in bfloat16 for this processor. Others than x86 are not asked."""
    is_x86 = torch.cpu.get_capabilities().get("architecture") == "x86_64"
    return not is_x86 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def _has_avx512() -> bool:
    """Whether torch uses AVX-512."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


@cache
def onednn_is_faster() -> bool:
    """Whether this is an x86 CPU for which MKL is not optimized."""
    capabilities = torch.cpu.get_capabilities()
    is_x86 = capabilities.get("architecture") == "x86_64"
    return (
        is_x86
        and "Intel" not in str(capabilities.get("cpu_name"))
        and not capabilities.get("amx_bf16")
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkl.is_available()
    )


class _Linear(torch.autograd.Function):
    """A linear map that does not save its weight in the autocast precision.

    The backward pass casts it again, so the weight must not change before.
    """

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.settings = x.dtype, None if bias is None else bias.dtype
        x, rounded = x.to(dtype or x.dtype), weight.to(dtype or weight.dtype)
        ctx.save_for_backward(x, weight)
        return _linear(x, rounded, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Context, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x_dtype, bias_dtype = ctx.settings
        d_out = grad_outputs[0]
        d_out = d_out.reshape(-1, d_out.shape[-1])
        dx = dw = db = None
        # backward() may be called under autocast, but uses the precision of the forward pass.
        with torch.autocast(x.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                dx = product(d_out, weight.to(x.dtype)).view(x.shape).to(x_dtype)
            if ctx.needs_input_grad[1]:
                dw = product(d_out.T, x.reshape(-1, x.shape[-1])).to(weight.dtype)
            if ctx.needs_input_grad[2]:
                # sum(dtype=...) would cast the whole tensor first.
                db = d_out.sum(0).to(bias_dtype)
        return dx, dw, db, None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what :func:`linear` does, without autograd where oneDNN is used."""
    if emulates(x.dtype, x.device.type):
        bias = None if bias is None else bias.float()
        return _linear(x.float(), weight.float(), bias).to(x.dtype)
    if not takes_onednn(x, weight):
        return F.linear(x, weight, bias)
    if _has_avx512():
        with onednn(True):
            return F.linear(x, weight, bias)
    # Without AVX-512, torch ignores the setting. This would copy a transposed x.
    rows = x.reshape(-1, x.shape[-1])
    out = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return out.reshape(*x.shape[:-1], out.shape[-1])
