r"""Fused linear layer and cross-entropy, without materializing all logits.

The (n, V) logits and their gradient are computed in chunks of tokens. The forward pass also
computes the gradients, while the probabilities of a chunk are available: with $P$ the probabilities
and $Y$ the one-hot targets, -log p of row $i$ has the gradient $(P - Y)_i W$ for $x_i$ and
contributes $(P - Y)_i^T x_i$ to that of $W$. If the upstream gradient is the same for all rows, as
with a mean, the backward pass only scales them; otherwise it recomputes the chunks.
"""

from importlib import import_module
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl.ops import triton
from transformer_xl.ops.context import Context
from transformer_xl.ops.products import add_product, product

CHUNK = 2 << 20
"""Logits of a chunk: 8 MB in float32, which fits in a cache."""
GPU_CHUNK = 1 << 27
"""Logits of a chunk on a GPU, many, as each chunk has a dozen launches: 256 MB in bfloat16 with the
fused kernels, 768 MB without them, 512 MB in float32."""
IGNORED = -100
"""The target that is ignored, as in PyTorch."""
LEAST_ROWS = 256
"""Minimum tokens of a chunk, as each chunk updates the whole gradient of the weights."""


def linear_nll(
    x: Float[Tensor, "n E"],
    weight: Float[Tensor, "V E"],
    bias: Float[Tensor, " V"],
    targets: Int[Tensor, " n"],
) -> Float[Tensor, " n"]:
    """Return -log p of each target, in nats, where p is the softmax of ``x weight^T + bias``.

    For a target of -100 it is 0, and so are its gradients. The softmax is computed in float32 at
    least, whatever the precision of the product. Another target outside of the vocabulary raises an
    IndexError or RuntimeError; the kernels of a GPU, which cannot, make its loss and gradients NaN.

    Example:
        >>> x, weight, bias = torch.zeros(2, 4), torch.zeros(8, 4), torch.zeros(8)
        >>> linear_nll(x, weight, bias, targets=torch.tensor([5, -100]))  # the first is log 8
        tensor([2.0794, 0.0000])
    """
    if torch.compiler.is_compiling():
        # The compiler fuses this itself.
        logits = _at_least_float32(F.linear(x, weight, bias))
        return F.cross_entropy(logits, targets, reduction="none")
    device = x.device.type
    is_cast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_cast else x.dtype
    with torch.autocast(device, enabled=False):
        if device == "cpu" and bool((targets == IGNORED).any()):
            # Logits of ignored targets are not computed. Elsewhere, counting the others would
            # synchronize the device.
            (rows,) = torch.nonzero(targets != IGNORED, as_tuple=True)
            nll = _nll(x[rows], weight, bias, targets[rows], dtype)
            return nll.new_zeros(len(x)).index_copy(0, rows, nll)
        return _nll(x, weight, bias, targets, dtype)


def _nll(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    if not torch.is_grad_enabled():
        return _pass(x, weight, bias, targets, dtype, None, (False, False, False))[0]
    return cast(Tensor, _LinearNLL.apply(x, weight, bias, targets, dtype))


class _LinearNLL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, dtype: torch.dtype
    ) -> Tensor:
        # Comparing upstream gradients would synchronize a GPU.
        is_at_once = x.device.type == "cpu"
        needed = ctx.needs_input_grad[:3] if is_at_once else (False, False, False)
        nll, gradients = _pass(x, weight, bias, targets, dtype, None, needed)
        ctx.save_for_backward(x, weight, bias, targets)
        ctx.settings = gradients if is_at_once else None, dtype
        return nll

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Context, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        scale = grad_outputs[0]
        # Released, as autograd may modify them; a second backward pass recomputes them.
        gradients, dtype = ctx.settings
        ctx.settings = None, dtype
        if gradients is not None and bool((scale == scale[:1]).all()):
            for gradient in gradients:
                if gradient is not None and len(scale):
                    gradient.mul_(scale[0])
        else:
            x, weight, bias, targets = ctx.saved_tensors
            needed = ctx.needs_input_grad[:3]
            scale = _counted(scale, targets)
            _, gradients = _pass(x, weight, bias, targets, dtype, scale, needed)
        return *gradients, None, None


def _pass(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None,
    needed: tuple[bool, ...],
) -> tuple[Tensor, list[Tensor | None]]:
    """Return -log p, and the needed gradients of its sum weighted by ``scale``; None: by 1.

    Products are computed in ``dtype`` and accumulated in the dtype of the operands.
    """
    nll = x.new_empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32))
    gradients = [
        torch.zeros_like(y) if is_needed else None
        for y, is_needed in zip((x, weight, bias), needed, strict=True)
    ]
    dx, dw, db = gradients
    V, w, b = len(weight), weight.to(dtype), bias.to(dtype)
    places = _counted(targets, targets)
    rows = max(LEAST_ROWS, (CHUNK if x.device.type == "cpu" else GPU_CHUNK) // V)
    kernels, width = None, V
    if has_kernels(x.device, dtype):
        kernels = import_module("transformer_xl.ops.triton_nll")
        # Rows begin at multiples of the vectors in which memory is stored and read.
        width = -(-V // 16) * 16
        b = F.pad(bias.float(), (0, width - V))
        # On a GPU it is given whenever gradients are needed; not so in Triton's interpreter.
        scale = torch.ones_like(nll) if scale is None and any(needed) else scale
    buffer = x.new_empty(min(rows, len(x)), width, dtype=dtype)[:, :V]
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        x_part, target = x[part].to(dtype), places[part]
        place, own_scale = buffer[: len(x_part)], None if scale is None else scale[part]
        if kernels is not None:
            d_logits = product(x_part, w.T, None, place)
            kernels.cross_entropy(d_logits, b, target, nll[part], own_scale)
        else:
            logits = _at_least_float32(product(x_part, w.T, b, place))
            d_logits = _cross_entropy(logits, target, nll[part], own_scale, any(needed))
        if db is not None:
            db += d_logits.sum(0, dtype=None if kernels is None else torch.float32)
        if not any(needed):
            continue
        d_logits = d_logits if d_logits.dtype == dtype else place.copy_(d_logits)
        if dx is not None:
            add_product(dx[part], d_logits, w)
        if dw is not None:
            add_product(dw, d_logits.T, x_part)
    return _counted(nll, targets), gradients


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the softmax of a chunk is computed by Triton kernels, whatever attention uses."""
    return triton.reason_against(device, dtype, K=0) is None


def _cross_entropy(
    logits: Tensor, targets: Tensor, nll: Tensor, scale: Tensor | None, is_needed: bool
) -> Tensor:
    """Write -log p of each target; return its gradient, if needed, in place of the logits."""
    target = targets[:, None]
    logit, largest = logits.gather(1, target)[:, 0], logits.amax(-1)
    probs = torch.softmax(logits, -1, out=logits)
    # The largest probability is 1 / sum(exp(logits - largest)).
    nll.copy_(largest - logit - probs.amax(-1).log_())
    if is_needed:
        probs.scatter_add_(1, target, probs.new_full((), -1).expand_as(target))
        if scale is not None:
            probs *= scale[:, None]
    return probs


def _counted(x: Tensor, targets: Tensor) -> Tensor:
    """Zero the values of ignored targets."""
    return x.masked_fill(targets == IGNORED, 0)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
