"""Dropout with 16 random bits per element, faster than torch's on a CPU.

A 64-bit random number decides four elements, and the backward pass regenerates the mask from the
seed instead of saving it. Probabilities are rounded to multiples of 2^-16, and the scale matches
the rounded probability.
"""

from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl.ops.context import Context

_STEPS = 1 << 16


def dropout(
    x: Float[Tensor, "*shape"], p: float, training: bool, locked: bool = False
) -> Float[Tensor, "*shape"]:
    """Zero elements of ``x`` with probability ``p`` in training, and scale the others.

    With ``locked``, the mask is shared by all positions of a segment (variational dropout; Gal and
    Ghahramani, 2016).
    """
    if not training or p == 0:
        return x
    if locked:
        return x * dropout(x.new_ones(*x.shape[:-2], 1, x.shape[-1]), p, True)
    if not _has_masks(x):
        return F.dropout(x, p)
    return cast(Tensor, _Dropout.apply(x, p, new_seed()))


def relu_dropout(
    x: Float[Tensor, "*shape"], p: float, training: bool, locked: bool = False
) -> Float[Tensor, "*shape"]:
    """Return ``dropout(relu(x))``.

    The gradient mask is derived from the output, so nothing else is saved.
    """
    if not training or p == 0 or locked or not _has_masks(x):
        return dropout(torch.relu(x), p, training, locked)
    return cast(Tensor, _ReLUDropout.apply(x, p, new_seed()))


def _has_masks(x: Tensor) -> bool:
    """Whether masks are drawn here for a tensor, and not by torch."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def new_seed() -> int:
    """Draw a seed from torch's default generator, for reproducibility."""
    return int(torch.randint(1 << 62, ()))


def rounded(p: float) -> float:
    """Return the dropout probability rounded to 16 bits."""
    return min(round(p * _STEPS), _STEPS - 1) / _STEPS


def draw_kept(
    like: Tensor, p: float, generator: torch.Generator, dtype: torch.dtype | None = None
) -> Tensor:
    """Draw a mask like a tensor: 0 with probability ``p``, else 1."""
    n = like.numel()
    words = torch.empty(-(-n // 4), dtype=torch.int64, device=like.device)
    words.random_(-(1 << 63), None, generator=generator)
    bits = words.view(torch.int16)[:n].view(like.shape)
    least = int(rounded(p) * _STEPS) - _STEPS // 2
    # In the dtype of the factor, because multiplying by booleans is slow.
    kept = torch.empty(like.shape, dtype=dtype or like.dtype, device=like.device)
    return torch.ge(bits, least, out=kept)


def _dropped(x: Tensor, p: float, seed: int) -> Tensor:
    """Apply the dropout mask of a seed."""
    generator = torch.Generator().manual_seed(seed)
    if x.element_size() == 2:
        # A bitwise mask is faster than multiplication in half precision.
        kept = draw_kept(x, p, generator, torch.int16).neg_()
        kept = kept.bitwise_and_(x.view(torch.int16)).view(x.dtype)
    else:
        kept = draw_kept(x, p, generator)
        kept = torch.mul(kept, x, out=kept)
    return kept.mul_(1 / (1 - rounded(p)))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, p: float, seed: int) -> Tensor:
        ctx.settings = p, seed
        return _dropped(x, p, seed)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Context, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        p, seed = ctx.settings
        return _dropped(grad_outputs[0], p, seed), None, None


class _ReLUDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, p: float, seed: int) -> Tensor:
        y = _dropped(torch.relu(x), p, seed)
        ctx.save_for_backward(y)
        ctx.settings = (p,)
        return y

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Context, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (y,), (p,) = ctx.saved_tensors, ctx.settings
        dx = torch.ops.aten.threshold_backward(grad_outputs[0], y, 0)
        return dx.mul_(1 / (1 - rounded(p))), None, None
