"""Optimizers (AdamW, LAMB, Muon, SGD, Adagrad), weight averaging, learning rate schedules."""

# pyright: reportPrivateImportUsage=false

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import AveragedModel

from transformer_xl.config import TrainConfig
from transformer_xl.config.device import pick_precision
from transformer_xl.model.capture import captured
from transformer_xl.ops.products import batches_take_onednn, emulates, onednn

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
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
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
        self._captures: dict[torch.Size, _Iterations] = {}

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
        if not self._is_captured:
            return orthogonalize(x, self._iterations)
        if x.shape not in self._captures:
            if self._pool is None and x.device.type == "cuda":
                self._pool = torch.cuda.graph_pool_handle()
            self._captures[x.shape] = _Iterations(x, self._iterations, self._pool)
        return self._captures[x.shape](x)


class _Iterations:
    """The iterations for matrices of one shape, captured as a CUDA graph."""

    def __init__(
        self, like: Float[Tensor, "matrices rows columns"], iterations: int, pool: Any
    ) -> None:
        self._x, self._iterations = like.clone(), iterations
        self._orthogonal = like
        self._replay = captured(self._iterate, self._x, pool)

    def _iterate(self) -> None:
        self._orthogonal = orthogonalize(self._x, self._iterations)

    def __call__(self, x: Float[Tensor, "matrices rows columns"]) -> Tensor:
        """Return orthogonal matrices, which the next call overwrites."""
        self._x.copy_(x)
        self._replay()
        return self._orthogonal


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
    with onednn(batches_take_onednn(x)):
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
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
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
            # One tensor at a time on a CPU, for its cache; all at once on a GPU, where launches
            # dominate.
            lists = (parameters, grads, *states)
            if parameters and parameters[0].device.type == "cpu":
                for tensors in zip(*lists, strict=True):
                    self._move(group, *([x] for x in tensors))
            elif parameters:
                self._move(group, *lists)

    @staticmethod
    def _move(
        group: dict[str, Any],
        parameters: list[Tensor],
        grads: list[Tensor],
        means: list[Tensor],
        mean_squares: list[Tensor],
    ) -> None:
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
        # On the device, without synchronization. Zero weights or updates get a ratio of 1.
        has_ratio = (length > 0) & (wanted > 0)
        ratio = torch.where(has_ratio, wanted / (length + group["eps"]), 1.0)
        torch._foreach_mul_(updates, (ratio * group["lr"]).unbind())
        torch._foreach_sub_(parameters, updates)


PLATEAU_THRESHOLD = 1e-4
"""The least improvement of the validation loss that counts, as a share of the best one."""
LEAST_CHANGE = 1e-8
"""The least change of a learning rate on a plateau."""
_EMBEDDINGS = "embedding.weight"
"""Prefix of the embedding tables, one or one for each cluster, without their projections."""
_INSIDE = ("layers.", "lstm.", "body.")
"""Prefixes of the parameters inside the layers, for each kind of model."""


def lr_scale(
    config: TrainConfig,
    step: int,
    total_steps: int,
    cooldown_steps: float | None = None,
    *,
    plateau_scale: float = 1.0,
) -> float:
    """Return the learning rate of a step (from 0), as a share of the peak.

    Linear warmup, (s + 1) / (W + 1) in step s of W, then the schedule. For constant_cooldown, the
    last ``cooldown_steps`` (None: as configured) are a linear cooldown. For plateau,
    ``plateau_scale`` is what the validation losses so far have left (:class:`Plateau`).
    """
    warmup = config.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.schedule == "plateau":
        return plateau_scale
    floor = config.min_lr_ratio
    if config.schedule == "inverse_sqrt":
        return max(floor, math.sqrt(max(warmup, 1) / max(step, warmup, 1)))
    if config.schedule == "cosine":
        progress = (step - warmup) / max(total_steps - warmup, 1)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    cooldown = cooldown_steps or config.cooldown_fraction * total_steps
    left = (total_steps - step) / cooldown if cooldown else 1.0
    return floor + (1 - floor) * min(1.0, left)


@dataclass
class Plateau:
    """The learning rate that the validation losses have left: ``ReduceLROnPlateau`` of PyTorch.

    With its threshold of 1e-4 of the best loss, as in the authors' program. PyTorch's own cannot be
    used, as it changes learning rates, and ours are shares of a peak; and its state differs between
    versions.
    """

    scale: float = 1.0
    """Learning rate as a share of the peak."""
    best: float = math.inf
    """Lowest loss, as far as losses were lower by more than the threshold."""
    n_bad: int = 0
    """Losses in a row that were not."""

    def see(self, loss: float, config: TrainConfig) -> None:
        """Take the loss of a validation; lower the learning rate if too many did not improve."""
        # Densities of real numbers may have negative losses.
        if loss < self.best * (1 - math.copysign(PLATEAU_THRESHOLD, self.best)):
            self.best, self.n_bad = loss, 0
        else:
            self.n_bad += 1
        if self.n_bad > config.patience:
            self.n_bad = 0
            lowered = max(self.scale * config.decay_rate, config.min_lr_ratio)
            # PyTorch leaves out changes of a learning rate by less than 1e-8.
            if (self.scale - lowered) * config.lr > LEAST_CHANGE:
                self.scale = lowered


class Optimizer:
    """AdamW, LAMB, SGD, Adagrad, or Muon combined with AdamW.

    Weight decay applies to matrices only, not to biases and norms. Muon updates the matrices inside
    the layers; AdamW the embeddings, the softmax and all vectors. Muon iterates in the precision of
    training; its momentum has that of the weights. ``parts`` are the optimizers of PyTorch.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        parameters = dict(model.named_parameters())
        self._names: dict[Any, str] = {parameter: name for name, parameter in parameters.items()}
        matrices, vectors, tables, of_muon = [], [], [], defaultdict(list)
        for name, parameter in parameters.items():
            # XLNet's projections have a dimension for heads, and so have its biases.
            is_matrix = parameter.ndim == (3 if ".rel_attn." in name else 2)
            if config.optimizer == "muon" and is_matrix and name.startswith(_INSIDE):
                of_muon[_matrices_in(name, parameters)].append(parameter)
            elif config.embedding_lr != 1 and name.startswith(_EMBEDDINGS):
                tables.append(parameter)
            else:
                (matrices if is_matrix else vectors).append(parameter)
        # With the key that PyTorch's own schedulers use for the peak of the learning rate.
        decay, lr = config.weight_decay, config.lr
        groups = [
            {"params": matrices, "weight_decay": decay, "initial_lr": lr},
            {"params": vectors, "weight_decay": 0.0, "initial_lr": lr},
        ]
        if tables:
            peak = lr * config.embedding_lr
            groups.append({"params": tables, "weight_decay": decay, "initial_lr": peak})
        # Of PyTorch's SGD and Adagrad the weight decay is not decoupled; it is applied in `step`.
        self._decays_itself = config.optimizer not in ("sgd", "adagrad")
        if not self._decays_itself:
            for group in groups:
                group["decoupled_decay"] = group.pop("weight_decay")
        self.parts: list[torch.optim.Optimizer] = [_for_all(config, groups)]
        if of_muon:
            # Queries, keys and values first, as in the checkpoints of earlier versions.
            groups = [
                {"params": of_muon[n], "parts": n, "initial_lr": config.muon_lr}
                for n in sorted({*of_muon, 1}, key=(3, 1, 2, 4).index)
            ]
            device = next(model.parameters()).device
            precision = pick_precision(config.precision, device)
            dtype = getattr(torch, precision)
            # Its iterations were made for the range of bfloat16.
            if precision == "float16" or emulates(dtype, device.type):
                dtype = torch.float32
            # Not with FSDP: a graph would keep whole matrices in each process.
            is_whole = not any(isinstance(x, DTensor) for x in parameters.values())
            is_captured = bool(config.compile) and is_whole and device.type == "cuda"
            how = {"dtype": dtype, "is_captured": is_captured}
            self.parts.append(Muon(groups, weight_decay=decay, **how))

    def skip(self) -> None:
        """Clear the gradients without an update."""
        for optimizer in self.parts:
            optimizer.zero_grad()

    def step(self, scale: float) -> None:
        """Update the weights at this share of their peak learning rates; clear the gradients."""
        for optimizer in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * scale
                if not self._decays_itself and group["decoupled_decay"]:
                    with torch.no_grad():
                        moved = [x for x in group["params"] if x.grad is not None]
                        torch._foreach_mul_(moved, 1 - group["lr"] * group["decoupled_decay"])
            optimizer.step()
            optimizer.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """Return the optimizer state of each weight, as ``optimizer.{weight}.{what}``."""
        return {
            f"optimizer.{self._names[parameter]}.{what}": tensor
            for optimizer in self.parts
            for parameter, known in optimizer.state.items()
            for what, tensor in known.items()
        }

    def allocate(self, stored: Iterable[str]) -> None:
        """Allocate the state that a checkpoint holds, given the names of its tensors."""
        states = {
            f"optimizer.{self._names[parameter]}": (parameter, optimizer.state[parameter])
            for optimizer in self.parts
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for full_name in stored:
            name, _, what = full_name.rpartition(".")
            if name in states:
                parameter, state = states[name]
                # Adagrad begins with its state, on the devices that it wants.
                if what in state:
                    continue
                # AdamW has a step counter for each weight.
                state[what] = torch.zeros_like(parameter, requires_grad=False)
                if what == "step":
                    state[what] = torch.zeros((), device=parameter.device)


def _for_all(config: TrainConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return the optimizer of all weights, or with Muon of the rest."""
    betas, eps = (config.beta1, config.beta2), config.eps
    if config.optimizer == "lamb":
        return Lamb(groups, betas=betas, eps=eps)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=config.momentum)
    if config.optimizer == "adagrad":
        return torch.optim.Adagrad(groups, eps=eps)
    return torch.optim.AdamW(groups, fused=True, betas=betas, eps=eps)


def _matrices_in(name: str, parameters: Mapping[str, Tensor]) -> int:
    """Return how many matrices are stacked in a parameter along its rows."""
    # Queries, keys and values; what a gate makes of one input.
    if name.endswith(("qkv_proj.weight", "gate.made_proj.weight")):
        return 3
    if name.endswith("gate.old_proj.weight"):
        return 2
    if name.endswith("inner.weight"):
        # Gated layers (GLU) have twice as many inner outputs.
        outer = parameters[name.removesuffix("inner.weight") + "outer.weight"]
        return len(parameters[name]) // outer.shape[1]
    # The four gates of an LSTM.
    return 4 if name.startswith("lstm.") else 1


class _Average(AveragedModel):
    """PyTorch's average, exponential or (decay None) the mean, without synchronizing a GPU."""

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        super().__init__(model)
        self._decay = decay
        self._listed: tuple[nn.Module, list[Tensor], list[Tensor]] | None = None

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Add the current weights to the average, each time of the same model."""
        n = int(self.n_averaged)
        # The first weights are taken as they are.
        share = 1 / (n + 1) if self._decay is None or n == 0 else 1 - self._decay
        if self._listed is None:
            # Once, after both were sharded: to look for them takes longer than to average them.
            self._listed = model, [*self.module.parameters()], [*model.parameters()]
        of, averaged, present = self._listed
        assert of is model
        torch._foreach_lerp_(averaged, present, share)
        for kept, own in zip(self.module.buffers(), model.buffers(), strict=True):
            kept.copy_(own)
        self.n_averaged += 1


def new_average(model: nn.Module, config: TrainConfig) -> AveragedModel | None:
    """Return the average of the weights that settings ask for; None without one.

    ``tail`` is Polyak averaging (Polyak and Juditsky, 1992) over the last part of a run, like ASGD
    in Merity et al. (arXiv 1708.02182) with a fixed trigger.
    """
    if config.average == "none":
        return None
    return _Average(model, config.average_decay if config.average == "ema" else None)


def average_start(config: TrainConfig) -> float:
    """Return the progress at which averaging starts."""
    if config.average_start is not None:
        return config.average_start
    return 0.0 if config.average == "ema" else 1 - config.cooldown_fraction
