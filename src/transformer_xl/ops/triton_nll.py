"""Triton kernels of the cross-entropy: the loss of rows of logits, and its gradient in their place.

Logits are read once for the loss, and read and written once for the gradient, in the precision of
the product that they are the result of; all sums are in float32.

This module needs Triton; :mod:`transformer_xl.ops.nll` imports it on first use.
"""

from importlib import import_module
from typing import Any, no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_xl.ops.triton_forward import LOG2_E

# Dynamic import, as Triton may be missing when types are checked.
triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

BLOCK = 4096
"""Maximum logits that a program reads at a time."""


def cross_entropy(
    logits: Float[Tensor, "n V"],
    bias: Float[Tensor, " row"],
    targets: Int[Tensor, " n"],
    nll: Float[Tensor, " n"],
    scale: Float[Tensor, " n"] | None,
) -> None:
    """Write -log p of each target, and its gradient times ``scale`` in place of the logits.

    Args:
        logits: Rows of logits without their bias; each row is contiguous, and the end of its
            storage, which may be longer, is overwritten, too.
        bias: Added to the logits, and as long as the storage of a row.
        targets: Symbols; the loss and the gradient of one outside of the vocabulary are NaN.
        nll: Where -log p of each target is written, in nats.
        scale: The gradient of the loss by each -log p. None: the logits are left as they are.
    """
    n, V, row = *logits.shape, logits.stride(0)
    block = min(BLOCK, max(128, 1 << (V - 1).bit_length()))
    statistics = torch.empty(2, n, dtype=torch.float32, device=logits.device)
    operands = (logits, bias, targets.contiguous(), statistics)
    options = {"BLOCK": block, "num_warps": 8 if block > 1024 else 4}
    with torch.cuda.device_of(logits):
        loss_kernel[n,](*operands, nll, n, V, row, **options)
        if scale is not None:
            grid = (n, -(-V // block))
            logit_gradient_kernel[grid](*operands, scale.contiguous(), n, V, row, **options)


@triton.jit
@no_type_check
def load_scores(logits, bias, columns, V, stride):
    """Load logits of a row and add their bias; columns beyond V are minus infinity."""
    # By the length of a row in memory, which is a multiple of a vector, as V may not be.
    is_there = columns < stride
    score = tl.load(logits + columns, mask=is_there, other=0.0).to(tl.float32)
    score += tl.load(bias + columns, mask=is_there, other=0.0)
    return tl.where(columns < V, score, float("-inf"))


@triton.jit(do_not_specialize=["n"])
@no_type_check
def loss_kernel(logits, bias, targets, statistics, nll, n, V, stride, BLOCK: tl.constexpr):
    """Compute -log p of the target of a row, its largest logit and 1 / sum(exp(logit - largest)).

    Each place of a block has a softmax of its own, so that threads do not wait for each other; they
    are combined at the end.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        score = load_scores(logits, bias, start + tl.arange(0, BLOCK), V, stride)
        higher = tl.maximum(highest, score)
        # Avoids infinity minus infinity where there is no logit.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        faded = tl.exp2((highest - level) * LOG2_E)
        total = total * faded + tl.exp2((score - level) * LOG2_E)
        highest = higher
    largest = tl.max(highest, 0)
    total = tl.sum(total * tl.exp2((highest - largest) * LOG2_E), 0)
    target = tl.load(targets + row)
    # Checking it first would synchronize the device.
    is_word = (target >= 0) & (target < V)
    own = tl.load(logits + target, mask=is_word, other=float("nan")).to(tl.float32)
    own += tl.load(bias + target, mask=is_word, other=0.0)
    tl.store(nll + row, largest - own + tl.log(total))
    tl.store(statistics + row, largest)
    tl.store(statistics + n + row, 1 / total)


@triton.jit(do_not_specialize=["n"])
@no_type_check
def logit_gradient_kernel(
    logits, bias, targets, statistics, scale, n, V, stride, BLOCK: tl.constexpr
):  # fmt: skip
    """Replace logits of a row by the gradient of its loss: p minus 1 for the target, scaled."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    score = load_scores(logits, bias, columns, V, stride)
    largest, share = tl.load(statistics + row), tl.load(statistics + n + row)
    p = tl.exp2((score - largest) * LOG2_E) * share
    target = tl.load(targets + row)
    is_word = (target >= 0) & (target < V)
    by_loss = tl.where(is_word, tl.load(scale + row).to(tl.float32), float("nan"))
    gradient = tl.where(columns == target, p - 1, p) * by_loss
    tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < stride)
