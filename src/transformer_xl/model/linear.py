"""Linear maps that are computed by :func:`transformer_xl.ops.linear`."""

from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transformer_xl.ops import linear

_Module = TypeVar("_Module", bound=nn.Module)


class Linear(nn.Linear):
    """A linear map whose forward pass is the faster product of this package."""

    def forward(
        self, input: Float[Tensor, "*batch E"], *, first_row: int = 0
    ) -> Float[Tensor, "*batch rows"]:
        """Multiply by the weights, or by the rows of them from ``first_row`` on."""
        weight = self.weight[first_row:] if first_row else self.weight
        return linear(input, weight, self.bias)


def with_torch_linears(model: _Module) -> _Module:
    """Make the linear maps of a model those of torch, with the same weights; return the model.

    For programs that look for exactly :class:`torch.nn.Linear`, such as ``quantize_dynamic``.
    """
    for module in model.modules():
        if type(module) is Linear:
            cast(Any, module).__class__ = nn.Linear
    return model


def is_fast(module: nn.Module) -> bool:
    """Whether a module is a :class:`Linear` whose ``forward`` was not replaced."""
    return type(module) is Linear and "forward" not in vars(module)


def rows_from(
    module: nn.Module, x: Float[Tensor, "*batch E"], first_row: int
) -> Float[Tensor, "*batch rows"]:
    """Return the outputs of a linear map from ``first_row`` on, computing no others if possible."""
    return module(x, first_row=first_row) if is_fast(module) else module(x)[..., first_row:]


def project(
    qkv_proj: nn.Module,
    x: Float[Tensor, "B T D"],
    memory: Float[Tensor, "B M D"] | None,
    n_head: int,
) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B S H K"], Float[Tensor, "B S H K"]]:
    """Project a segment to queries, and memory and segment to keys and values.

    A :class:`Linear` is called for each of them: queries of the memory, which nobody
    needs, would be a third of its products. A module that was put in its place may not know how to
    leave them out, and is called once for both.

    Returns:
        Queries, keys and values; the latter with heads outermost in memory, as attention reads
        them.
    """
    past = None
    if memory is None:
        own = qkv_proj(x)
    elif is_fast(qkv_proj):
        own = qkv_proj(x)
        past = qkv_proj(memory, first_row=own.shape[-1] // 3)
    else:
        past, own = qkv_proj(torch.cat([memory, x], 1)).split([memory.shape[1], x.shape[1]], 1)
        past = past[..., own.shape[-1] // 3 :]
    q, k, v = own.unflatten(-1, (3, n_head, -1)).unbind(2)
    if past is None:
        return q, k, v
    before = past.unflatten(-1, (2, n_head, -1)).unbind(2)
    k, v = (
        torch.cat([y.permute(2, 0, 1, 3) for y in pair], 2).permute(1, 2, 0, 3)
        for pair in zip(before, (k, v), strict=True)
    )
    # A copy, so that the backward pass does not keep the keys and values of the segment twice.
    return q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3), k, v
