"""Products of large matrices in float32, with the library that is fast on this processor.

torch hands float32 products to MKL, which uses less than half of what a processor that is not
Intel's can do (AMD Zen 5: 200 against 450 GFLOP/s). oneDNN, which torch carries as well, computes
the same sums in the same precision at full speed. Small products stay where they are: there the
way to oneDNN costs more than it saves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl.ops.compact import CompactWeight

LEAST_WORK = 1 << 23
"""Multiplications from which on a product is large."""
LEAST_ROWS = 32
"""Rows from which on it is: a product of few rows only waits for the memory."""


def linear(
    x: Float[Tensor, "*batch E"],
    weight: Float[Tensor, "F E"] | CompactWeight,
    bias: Float[Tensor, " F"] | None,
) -> Float[Tensor, "*batch F"]:
    """Return ``x weight^T + bias``, as :func:`torch.nn.functional.linear` does."""
    if isinstance(weight, CompactWeight):
        return weight.product(x, bias)
    if not takes_onednn(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return cast(Tensor, _Linear.apply(x, weight, bias))
    return _product(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


def product(a: Float[Tensor, "rows inner"], b: Float[Tensor, "inner F"]) -> Tensor:
    """Return ``a b`` without a graph."""
    return _product(a, b.T, None) if takes_onednn(a, b.T) else a @ b


def takes_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether a product by ``weight`` transposed is left to oneDNN."""
    rows = x.numel() // max(x.shape[-1], 1)
    return (
        rows >= LEAST_ROWS
        and rows * weight.numel() >= LEAST_WORK
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and onednn_is_faster()
    )


@contextmanager
def fast_batches(x: Float[Tensor, "*batch T K"]) -> Iterator[None]:
    """Let oneDNN compute the products of batches of matrices like ``x`` inside a ``with`` block.

    torch asks it for no more than "products in float32, or with bfloat16 inside where that is
    faster". A processor with AMX would take that up, and keeps MKL; all others have no faster
    way than float32 (measured: the same errors against float64).
    """
    is_asked = (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.shape[-2] >= LEAST_ROWS
        and not torch.compiler.is_compiling()
        and onednn_is_faster()
        and not torch.cpu.get_capabilities().get("amx_bf16")
    )
    if not is_asked:
        yield
        return
    setting = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before, setting.fp32_precision = setting.fp32_precision, "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before


@cache
def onednn_is_faster() -> bool:
    """Whether this processor is one that MKL was not made for."""
    capabilities = torch.cpu.get_capabilities()
    is_x86 = capabilities.get("architecture") == "x86_64"
    return (
        is_x86
        and "Intel" not in str(capabilities.get("cpu_name"))
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkl.is_available()
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_out = grad_outputs[0].flatten(0, -2)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = _product(d_out, weight.T, None).view(x.shape)
        if ctx.needs_input_grad[1]:
            dw = _product(d_out.T, x.flatten(0, -2).T, None)
        if ctx.needs_input_grad[2]:
            db = d_out.sum(0)
        return dx, dw, db


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
