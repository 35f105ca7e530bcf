"""Muon: momentum whose update is made orthogonal, for the matrices inside the layers.

Follows Jordan et al., https://kellerjordan.github.io/posts/muon. ``torch.optim.Muon`` does the
same one matrix at a time and always in bfloat16, which many processors only emulate; this one
takes all matrices of a shape at once and computes in the precision that it is told. Of weights
that are sharded, every process computes all updates and takes its part.
"""

# pyright: reportPrivateImportUsage=false

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

# The quintic polynomial of the reference: it lifts small singular values fastest and ends with
# all of them between about 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalized by Newton-Schulz iterations, with decoupled decay.

    Args:
        params: Matrices, or groups of them. A group's ``parts`` says how many matrices are stacked
            in each parameter along its rows (3 for queries, keys and values); 1 by default.
        lr: Step length: the largest singular value of an update, for a square matrix.
        momentum: Decay of the mean gradient.
        weight_decay: Decoupled decay; the weights shrink by ``lr * weight_decay`` in each step.
        iterations: Newton-Schulz iterations.
        dtype: Precision of the iterations.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        iterations: int = 5,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "parts": 1}
        super().__init__(params, defaults)
        self._iterations, self._dtype = iterations, dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every matrix that has a gradient."""
        loss = closure() if closure is not None else None
        alike: dict[tuple[torch.Size, float], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        shared: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            parameters = [x for x in group["params"] if x.grad is not None]
            grads = [x.grad for x in parameters]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
            means = [self.state[x]["momentum"] for x in parameters]
            if parameters:
                torch._foreach_lerp_(means, grads, 1 - group["momentum"])
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            for parameter, grad, mean in zip(parameters, grads, means, strict=True):
                ahead = grad.lerp(mean, group["momentum"])
                changed: Tensor = parameter
                if isinstance(ahead, DTensor):
                    # Singular vectors are those of a whole matrix, whoever holds its rows.
                    ahead = ahead.full_tensor()
                    changed = torch.zeros_like(ahead)
                    shared.append((parameter, changed))
                for matrix, update in zip(
                    changed.chunk(group["parts"]), ahead.chunk(group["parts"]), strict=True
                ):
                    alike[matrix.shape, group["lr"]].append((matrix, update))
        for ((rows, columns), lr), entries in alike.items():
            matrices, ahead = (list(each) for each in zip(*entries, strict=True))
            updates = orthogonalize(torch.stack(ahead).to(self._dtype), self._iterations)
            # A map to more dimensions than it comes from needs longer columns for the same change.
            scale = max(1.0, rows / columns) ** 0.5
            changes = updates.to(matrices[0].dtype).unbind()
            torch._foreach_add_(matrices, changes, alpha=-lr * scale)
        for parameter, change in shared:
            assert isinstance(parameter, DTensor)
            own = distribute_tensor(
                change, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
            parameter.add_(own)
        return loss


def orthogonalize(
    x: Float[Tensor, "matrices rows columns"], iterations: int
) -> Float[Tensor, "matrices rows columns"]:
    """Bring all singular values of each matrix near 1 and keep its singular vectors."""
    a, b, c = COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    # The iteration converges for singular values up to 1, and none exceeds the Frobenius norm.
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
