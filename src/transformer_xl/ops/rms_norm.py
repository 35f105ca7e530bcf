"""RMS normalization (Zhang and Sennrich, 2019), on a CPU with the kernel of layer normalization.

torch computes it on a CPU operation by operation, while the layer normalization has a kernel. That
kernel serves here too: given a mean of zero, it subtracts one term too many, which is added again.
"""

from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl.ops.context import Context


def rms_norm(
    x: Float[Tensor, "*batch D"], weight: Float[Tensor, " D"], eps: float
) -> Float[Tensor, "*batch D"]:
    r"""Return ``weight`` times ``x``, divided by the root of its mean square.

    $$y_i = w_i x_i / \sqrt{\frac{1}{D} \sum_j x_j^2 + \epsilon}$$

    Example:
        >>> rms_norm(torch.tensor([[1.0, 7.0]]), torch.ones(2), eps=0.0)
        tensor([[0.2000, 1.4000]])
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    # Sums over a row need more digits than half precision has.
    dtype = torch.promote_types(x.dtype, torch.float32)
    return cast(Tensor, _RMSNorm.apply(x.to(dtype), weight.to(dtype), eps)).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        D = x.shape[-1]
        x = x.contiguous()
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().mul_(1 / D)
        scale = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, weight)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Context, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, scale, weight = ctx.saved_tensors
        needed = [*ctx.needs_input_grad[:2], False]
        dy = grad_outputs[0].contiguous()
        no_mean, no_bias = torch.zeros_like(scale), torch.zeros_like(weight)
        dx, dw, _ = torch.ops.aten.native_layer_norm_backward(
            dy, x, weight.shape, no_mean, scale, weight, no_bias, needed
        )
        if needed[0]:
            # What a layer normalization takes away because it subtracts the mean.
            dx += (dy @ weight)[..., None].mul_(scale).mul_(1 / x.shape[-1])
        return dx if needed[0] else None, dw if needed[1] else None, None
