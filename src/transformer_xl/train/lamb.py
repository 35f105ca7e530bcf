"""LAMB: Adam whose update of each tensor is as long as the tensor itself, times the learning rate.

You et al., Large Batch Optimization for Deep Learning, 2020 (arXiv 1904.00962), algorithm 2, in the
form with which NVIDIA trained its Transformer-XL: the means are not corrected for their start at
zero, as in the third version of that paper, and norms of weights count up to 10.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

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
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                    state["mean_square"] = torch.zeros_like(parameter)
                mean = state["mean"].lerp_(grad, 1 - beta1)
                mean_square = state["mean_square"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                update = mean / mean_square.sqrt().add_(group["eps"])
                update.add_(parameter, alpha=group["weight_decay"])
                length, wanted = update.norm(), parameter.norm().clamp(max=LARGEST_NORM)
                # Chosen on the device, which is not waited for. Zeros have no length yet.
                has_ratio = (length > 0) & (wanted > 0)
                ratio = torch.where(has_ratio, wanted / (length + group["eps"]), 1.0)
                parameter.sub_(update.mul_(ratio * group["lr"]))
        return loss
