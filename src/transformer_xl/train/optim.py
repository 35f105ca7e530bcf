"""The optimizer of a training, weight averaging, learning rate schedules."""

# pyright: reportPrivateImportUsage=false

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from transformer_xl.config import Precision, TrainConfig
from transformer_xl.ops import emulates
from transformer_xl.train.optimizers import Lamb, Muon

_EMBEDDINGS = "embedding.weight"
"""Prefix of the embedding tables, one or one for each cluster, without their projections."""
_INSIDE = ("layers.", "lstm.", "body.")
"""Prefixes of the parameters inside the layers, for each kind of model."""


def lr_scale(
    config: TrainConfig, step: int, total_steps: int, cooldown_steps: float | None = None
) -> float:
    """Return the learning rate of a step (from 0), as a share of the peak.

    Linear warmup, (s + 1) / (W + 1) in step s of W, then the schedule. For constant_cooldown, the
    last ``cooldown_steps`` (None: as configured) are a linear cooldown.
    """
    warmup, floor = config.warmup_steps, config.min_lr_ratio
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.schedule == "inverse_sqrt":
        return max(floor, math.sqrt(max(warmup, 1) / max(step, warmup, 1)))
    if config.schedule == "cosine":
        progress = (step - warmup) / max(total_steps - warmup, 1)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    cooldown = cooldown_steps or config.cooldown_fraction * total_steps
    left = (total_steps - step) / cooldown if cooldown else 1.0
    return floor + (1 - floor) * min(1.0, left)


class Optimizer:
    """AdamW, LAMB, SGD, or Muon combined with AdamW.

    Weight decay applies to matrices only, not to biases and norms. Muon updates the matrices inside
    the layers; AdamW the embeddings, the softmax and all vectors. Muon iterates in the precision of
    training; its momentum has that of the weights. ``parts`` are the optimizers of PyTorch.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        parameters = dict(model.named_parameters())
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        matrices, vectors, tables, stacked = [], [], [], defaultdict(list)
        for name, parameter in parameters.items():
            is_matrix = parameter.ndim == 2
            if config.optimizer == "muon" and is_matrix and name.startswith(_INSIDE):
                stacked[_matrices_in(name, parameters)].append(parameter)
            elif config.embedding_lr != 1 and name.startswith(_EMBEDDINGS):
                tables.append(parameter)
            else:
                (matrices if is_matrix else vectors).append(parameter)
        decay, lr = config.weight_decay, config.lr
        # Of PyTorch's SGD the weight decay is not decoupled; it is applied in `step`.
        name = "decoupled_decay" if config.optimizer == "sgd" else "weight_decay"
        # With the key that PyTorch's own schedulers use for the peak of the learning rate.
        groups: list[dict[str, object]] = [
            {"params": matrices, name: decay, "initial_lr": lr},
            {"params": vectors, name: 0.0, "initial_lr": lr},
        ]
        if tables:
            groups.append({"params": tables, name: decay, "initial_lr": lr * config.embedding_lr})
        betas, eps = (config.beta1, config.beta2), config.eps
        if config.optimizer == "lamb":
            main = Lamb(groups, betas=betas, eps=eps)
        elif config.optimizer == "sgd":
            main = torch.optim.SGD(groups, momentum=config.momentum)
        else:
            main = torch.optim.AdamW(groups, fused=True, betas=betas, eps=eps)
        self.parts: list[torch.optim.Optimizer] = [main]
        if not stacked:
            return
        # Queries, keys and values first, as in the checkpoints of earlier versions.
        groups = [
            {"params": stacked[n], "parts": n, "initial_lr": config.muon_lr}
            for n in sorted({*stacked, 1}, key=(3, 1, 2, 4).index)
        ]
        device = next(model.parameters()).device
        precision = Precision(config.precision, device).name
        dtype = getattr(torch, precision)
        # Its iterations were made for the range of bfloat16.
        if precision == "float16" or emulates(dtype, device.type):
            dtype = torch.float32
        # Not with FSDP: a graph would keep whole matrices in each process.
        is_whole = not any(isinstance(x, DTensor) for x in parameters.values())
        is_captured = bool(config.compile) and is_whole and device.type == "cuda"
        muon = Muon(groups, weight_decay=decay, dtype=dtype, is_captured=is_captured)
        self.parts.append(muon)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update the weights at this share of their peak learning rates; clear the gradients."""
        for optimizer in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * scale
                if decay := group.get("decoupled_decay"):
                    updated = [x for x in group["params"] if x.grad is not None]
                    torch._foreach_mul_(updated, 1 - group["lr"] * decay)
            optimizer.step()
            optimizer.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """Return the optimizer state of each weight, as ``optimizer.{weight}.{what}``."""
        return {
            f"optimizer.{self._names[parameter]}.{what}": tensor
            for optimizer in self.parts
            for parameter, state in optimizer.state.items()
            for what, tensor in state.items()
        }

    def allocate(self, names: Iterable[str]) -> None:
        """Allocate the state that a checkpoint holds, given the names of its tensors."""
        states = {
            f"optimizer.{self._names[parameter]}": (parameter, optimizer.state[parameter])
            for optimizer in self.parts
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for full_name in names:
            name, _, what = full_name.rpartition(".")
            if name in states:
                parameter, state = states[name]
                state[what] = torch.zeros_like(parameter, requires_grad=False)
                if what == "step":
                    # AdamW has a step counter for each weight.
                    state[what] = torch.zeros((), device=parameter.device)


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


class Average:
    """An average of the weights of a model, which reads nothing back from a GPU.

    The mean is Polyak averaging (Polyak and Juditsky, 1992) over the last part of a run, like ASGD
    in Merity et al. (arXiv 1708.02182) with a fixed trigger.

    Args:
        model: The model, which may be sharded before the first update, and the average with it.
        decay: Of an exponential average; None: the mean.

    Attributes:
        module: A model with the average as its weights.
        n_averaged: Number of updates.
    """

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        self.module = deepcopy(model)
        self.n_averaged, self._decay = 0, decay
        self._weights: tuple[list[Tensor], list[Tensor]] | None = None

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Add the current weights to the average, each time of the same model."""
        if self._weights is None:
            # Once, as to list them takes longer than to average them.
            self._weights = [*self.module.parameters()], [*model.parameters()]
        n = self.n_averaged
        # The first weights are taken as they are.
        share = 1 / (n + 1) if self._decay is None or n == 0 else 1 - self._decay
        torch._foreach_lerp_(*self._weights, share)
        for buffer, current in zip(self.module.buffers(), model.buffers(), strict=True):
            buffer.copy_(current)
        self.n_averaged += 1
