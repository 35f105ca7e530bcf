"""Optimizers that torch lacks: Muon and LAMB."""

# pyright: reportPrivateImportUsage=false

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from transformer_xl.model import captured
from transformer_xl.ops import fast_batches

# The quintic polynomial of the reference implementation, with the fastest growth of small singular
# values; it ends with all of them between about 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Muon: Nesterov momentum, orthogonalized by Newton-Schulz iterations.

    Follows Jordan et al., https://kellerjordan.github.io/posts/muon, for the matrices inside the
    layers. ``torch.optim.Muon`` processes one matrix at a time, always in bfloat16, which many CPUs
    only emulate; this implementation batches matrices of the same shape, in a given precision. With
    sharded weights, every process computes all updates and applies its shard.

    ``parts`` of a parameter group is the number of matrices that are stacked in each parameter
    along its rows (3 for queries, keys and values); ``lr`` the largest singular value of an update,
    for a square matrix; ``dtype`` the precision of the iterations. With ``is_captured`` a GPU
    replays them as a CUDA graph for each shape.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, object]],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        iterations: int = 5,
        dtype: torch.dtype = torch.float32,
        is_captured: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "parts": 1}
        super().__init__(params, defaults)
        self._iterations, self._dtype = iterations, dtype
        self._is_captured, self._pool = is_captured, None
        self._captures: dict[torch.Size, tuple[Tensor, list[Tensor], Callable[[], object]]] = {}

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every matrix that has a gradient, which is overwritten."""
        alike: dict[tuple[torch.Size, float], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        shared: list[tuple[DTensor, Tensor]] = []
        for group in self.param_groups:
            parameters, grads, (means,) = _with_gradients(self, group, "momentum")
            if parameters:
                torch._foreach_lerp_(means, grads, 1 - group["momentum"])
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                # In their place, as no one reads them after the update.
                torch._foreach_lerp_(grads, means, group["momentum"])
            for parameter, ahead in zip(parameters, grads, strict=True):
                changed: Tensor = parameter
                if isinstance(parameter, DTensor) and isinstance(ahead, DTensor):
                    # Orthogonalization needs the whole matrix.
                    ahead = ahead.full_tensor()
                    changed = torch.zeros_like(ahead)
                    shared.append((parameter, changed))
                matrices, updates = (x.flatten(1).chunk(group["parts"]) for x in (changed, ahead))
                alike[matrices[0].shape, group["lr"]].extend(zip(matrices, updates, strict=True))
        for ((rows, columns), lr), entries in alike.items():
            matrices, ahead = (list(each) for each in zip(*entries, strict=True))
            updates = self._orthogonal(torch.stack(ahead).to(self._dtype))
            # Scaled by the aspect ratio, as in the reference implementation.
            scale = max(1.0, rows / columns) ** 0.5
            changes = updates.to(matrices[0].dtype).unbind()
            torch._foreach_add_(matrices, changes, alpha=-lr * scale)
        for parameter, change in shared:
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.add_(distribute_tensor(change, mesh, placements, src_data_rank=None))

    def _orthogonal(self, x: Float[Tensor, "matrices rows columns"]) -> Tensor:
        """Return orthogonal matrices; those of a graph are overwritten by the next call."""
        if not self._is_captured:
            return orthogonalize(x, self._iterations)
        if x.shape not in self._captures:
            if self._pool is None and x.device.type == "cuda":
                self._pool = torch.cuda.graph_pool_handle()
            matrices, result = x.clone(), [x]

            def iterate() -> None:
                result[0] = orthogonalize(matrices, self._iterations)

            replay = captured(iterate, matrices, self._pool)
            self._captures[x.shape] = matrices, result, replay
        matrices, result, replay = self._captures[x.shape]
        matrices.copy_(x)
        replay()
        return result[0]


def _with_gradients(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], *names: str
) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
    """Return the parameters of a group that have gradients, these, and the named states."""
    parameters = [x for x in group["params"] if x.grad is not None]
    for parameter in parameters:
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = {name: torch.zeros_like(parameter) for name in names}
    states = [[optimizer.state[x][name] for x in parameters] for name in names]
    return parameters, [x.grad for x in parameters], states


def orthogonalize(
    x: Float[Tensor, "matrices rows columns"], iterations: int
) -> Float[Tensor, "matrices rows columns"]:
    """Replace the singular values of each matrix by values close to 1."""
    a, b, c = COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    # The iteration converges for singular values up to 1, and none exceeds the Frobenius norm.
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).contiguous()
    n, rows, _ = x.shape
    # Reused: new large tensors cost page faults in each product.
    y, gram, polynomial = (
        torch.empty_like(x),
        x.new_empty(n, rows, rows),
        x.new_empty(n, rows, rows),
    )
    with fast_batches(x):
        for _ in range(iterations):
            torch.bmm(x, x.mT, out=gram)
            torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
            torch.baddbmm(x, polynomial, x, beta=a, out=y)
            x, y = y, x
    return x.mT if tall else x


LARGEST_NORM = 10.0
"""Upper limit of weight norms in the trust ratio (the function phi of the paper)."""


class Lamb(torch.optim.Optimizer):
    """LAMB: Adam with the norm of each update scaled to that of its weight tensor.

    You et al., Large Batch Optimization for Deep Learning, 2020 (arXiv 1904.00962), algorithm 2, as
    in NVIDIA's training of Transformer-XL: without bias correction, as in the third version of that
    paper, and with weight norms clamped to 10. ``lr`` is a share of the norm of the tensor; the
    weight decay is added to the update before its norm is computed.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, object]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters, grads, states = _with_gradients(self, group, "mean", "mean_square")
            if not parameters:
                continue
            (means, mean_squares), (beta1, beta2) = states, group["betas"]
            torch._foreach_lerp_(means, grads, 1 - beta1)
            torch._foreach_mul_(mean_squares, beta2)
            torch._foreach_addcmul_(mean_squares, grads, grads, value=1 - beta2)
            roots = torch._foreach_sqrt(mean_squares)
            torch._foreach_add_(roots, group["eps"])
            updates = torch._foreach_div(means, roots)
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
            length, wanted = (torch.stack(torch._foreach_norm(x)) for x in (updates, parameters))
            wanted = wanted.clamp(max=LARGEST_NORM)
            # On the device, without synchronization. Zero weights or updates get a ratio of 1.
            has_ratio = (length > 0) & (wanted > 0)
            ratio = torch.where(has_ratio, wanted / (length + group["eps"]), 1.0)
            torch._foreach_mul_(updates, (ratio * group["lr"]).unbind())
            torch._foreach_sub_(parameters, updates)
