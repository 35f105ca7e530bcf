"""LAMB: Adam whose update of each tensor is as long as the tensor itself, times the learning rate.

You et al., Large Batch Optimization for Deep Learning, 2020 (arXiv 1904.00962), algorithm 2, in the
form with which NVIDIA trained its Transformer-XL: the means are not corrected for their start at
zero, as in the third version of that paper, and norms of weights count up to 10.
"""

# pyright: reportPrivateImportUsage=false

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

LARGEST_NORM = 10.0
"""The norm of a tensor above which its updates grow no further (the function phi of the paper)."""


class Lamb(torch.optim.Optimizer):
    """Adam with a trust ratio for each tensor.

    Args:
        params: Parameters, or groups of them.
        lr: Step length, as a share of the norm of the tensor.
        betas: Decay of the mean gradient and of the mean squared gradient.
        eps: Added to the denominators.
        weight_decay: Share of the weights that is added to the update before its norm is taken.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            parameters = [x for x in group["params"] if x.grad is not None]
            if not parameters:
                continue
            # A processor keeps one tensor after the other in its cache; a GPU takes longer to begin
            # an operation than most tensors need.
            if parameters[0].device.type == "cpu":
                for parameter in parameters:
                    self._move([parameter], group)
            else:
                self._move(parameters, group)
        return loss

    def _move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        grads = [x.grad for x in parameters if x.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                for name in ("mean", "mean_square"):
                    self.state[parameter][name] = torch.zeros_like(parameter)
        means = [self.state[x]["mean"] for x in parameters]
        mean_squares = [self.state[x]["mean_square"] for x in parameters]
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(mean_squares, beta2)
        torch._foreach_addcmul_(mean_squares, grads, grads, value=1 - beta2)
        roots = torch._foreach_sqrt(mean_squares)
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(means, roots)
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        length, wanted = (torch.stack(torch._foreach_norm(x)) for x in (updates, parameters))
        wanted = wanted.clamp(max=LARGEST_NORM)
        # Chosen on the device, which is not waited for. Zeros have no length yet.
        has_ratio = (length > 0) & (wanted > 0)
        ratio = torch.where(has_ratio, wanted / (length + group["eps"]), 1.0)
        torch._foreach_mul_(updates, (ratio * group["lr"]).unbind())
        torch._foreach_sub_(parameters, updates)
