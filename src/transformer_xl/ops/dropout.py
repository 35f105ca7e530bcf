"""Dropout from 16 random bits a number.

torch draws dropout on a CPU one number after the other, with a full random number for each. Here a
word of the same generator decides four numbers, and the backward pass draws the same words again
instead of keeping what was dropped. Probabilities are rounded to multiples of 2^-16, and the scale
goes with what they were rounded to.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

_STEPS = 1 << 16


def dropout(
    x: Float[Tensor, "*shape"], p: float, training: bool, locked: bool = False
) -> Float[Tensor, "*shape"]:
    """Return ``x`` with zeros in a random share ``p`` of its places, the rest scaled up.

    With ``locked`` the places are the same in all rows of a matrix (variational dropout; Gal and
    Ghahramani, 2016): at all positions of a segment.
    """
    if not training or p == 0:
        return x
    if locked:
        return x * dropout(x.new_ones(*x.shape[:-2], 1, x.shape[-1]), p, True)
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    return cast(Tensor, _Dropout.apply(x, p, new_seed()))


def relu_dropout(
    x: Float[Tensor, "*shape"], p: float, training: bool, locked: bool = False
) -> Float[Tensor, "*shape"]:
    """Return ``dropout(relu(x))``, at times in the place of ``x``.

    What is not positive in it is what has no gradient: nothing more is kept.
    """
    if not training or p == 0:
        # What autograd keeps an eye on may be a view, which cannot be changed in place.
        return torch.relu(x) if x.requires_grad else torch.relu_(x)
    if locked:
        return dropout(torch.relu(x), p, True, locked)
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(torch.relu(x), p)
    return cast(Tensor, _ReLUDropout.apply(x, p, new_seed()))


def relu_squared_dropout(
    x: Float[Tensor, "*shape"], p: float, training: bool, locked: bool = False
) -> Float[Tensor, "*shape"]:
    """Return ``dropout(relu(x) ** 2)``, at times in the place of ``x``.

    What is kept of it is its slope alone.
    """
    if not (training and p) and not x.requires_grad:
        return torch.relu_(x).square_()
    is_plain = x.device.type != "cpu" or torch.compiler.is_compiling()
    if is_plain or locked or not (training and p):
        return dropout(torch.relu(x).square(), p, training, locked)
    return cast(Tensor, _ReLUSquaredDropout.apply(x, p, new_seed()))


def new_seed() -> int:
    """Draw the seed of a generator from torch's own, so that a run can be repeated."""
    return int(torch.randint(1 << 62, ()))


def rounded(p: float) -> float:
    """Return the share that is really dropped."""
    return min(round(p * _STEPS), _STEPS - 1) / _STEPS


def draw_kept(
    like: Tensor, p: float, generator: torch.Generator, dtype: torch.dtype | None = None
) -> Tensor:
    """Draw a tensor of zeros, with probability ``p``, and ones; in the precision of ``like``."""
    n = like.numel()
    words = torch.empty(-(-n // 4), dtype=torch.int64, device=like.device)
    words.random_(-(1 << 63), None, generator=generator)
    bits = words.view(torch.int16)[:n].view(like.shape)
    least = int(rounded(p) * _STEPS) - _STEPS // 2
    # Ones and zeros in the precision of what they are multiplied with: booleans are slow to.
    kept = torch.empty(like.shape, dtype=dtype or like.dtype, device=like.device)
    return torch.ge(bits, least, out=kept)


def _dropped(x: Tensor, p: float, seed: int, scale: float = 1.0) -> Tensor:
    """Return ``x`` with zeros in some places, the rest scaled up, and by ``scale`` besides."""
    generator = torch.Generator().manual_seed(seed)
    if x.element_size() == 2:
        # All bits of what is kept and none of the rest: faster than products in half precision.
        kept = draw_kept(x, p, generator, torch.int16).neg_()
        kept = kept.bitwise_and_(x.view(torch.int16)).view(x.dtype)
    else:
        kept = draw_kept(x, p, generator)
        kept = torch.mul(kept, x, out=kept)
    return kept.mul_(scale / (1 - rounded(p)))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int) -> Tensor:
        ctx.settings = p, seed
        return _dropped(x, p, seed)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        p, seed = ctx.settings
        return _dropped(grad_outputs[0], p, seed), None, None


class _ReLUDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int) -> Tensor:
        y = _dropped(torch.relu(x), p, seed)
        ctx.save_for_backward(y)
        ctx.p = p
        return y

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        dx = torch.ops.aten.threshold_backward(grad_outputs[0], y, 0)
        return dx.mul_(1 / (1 - rounded(ctx.p))), None, None


class _ReLUSquaredDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int) -> Tensor:
        positive = torch.relu(x)
        slope = _dropped(positive, p, seed, scale=2.0)
        ctx.save_for_backward(slope)
        return positive.mul_(slope).mul_(0.5)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return grad_outputs[0] * slope, None, None
