"""Optimizers and learning rates as functions of the step."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from transformer_xl.config import TrainConfig
from transformer_xl.config.device import pick_precision
from transformer_xl.train.lamb import Lamb
from transformer_xl.train.muon import Muon

# The tables of word embeddings, one or one for each cluster; their projections learn as the layers.
_EMBEDDINGS = "embedding.weight"

# What the matrices inside the layers of either kind of model are called.
_INSIDE = ("layers.", "lstm.")


def lr_scale(
    config: TrainConfig, step: int, total_steps: int, cooldown_steps: float | None = None
) -> float:
    """Return the learning rate of the update ``step`` (from 0), as a share of the peak.

    A linear warm-up, then the schedule. The first update already moves the weights: with W
    warm-up steps, update s < W runs at (s + 1) / (W + 1). A cooldown of ``cooldown_steps``
    (constant_cooldown; None: the configured share of all) falls in a line to the end.
    """
    warmup = config.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    floor = config.min_lr_ratio
    if config.schedule == "inverse_sqrt":
        return max(floor, math.sqrt(max(warmup, 1) / max(step, warmup, 1)))
    if config.schedule == "cosine":
        progress = (step - warmup) / max(total_steps - warmup, 1)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    cooldown = cooldown_steps or config.cooldown_fraction * total_steps
    left = (total_steps - step) / cooldown if cooldown else 1.0
    return floor + (1 - floor) * min(1.0, left)


class Optimizer:
    """One or two optimizers that are stepped as one.

    Matrices decay, vectors (biases, norms) do not. With Muon, the matrices inside the layers
    belong to Muon, and the embeddings, the softmax and all vectors to AdamW. Muon computes in the
    precision of training, its momentum and the weights aside.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self._config = config
        parameters = dict(model.named_parameters())
        self._names: dict[Any, str] = {parameter: name for name, parameter in parameters.items()}
        muon = {}
        if config.optimizer == "muon":
            muon = {n: p for n, p in parameters.items() if n.startswith(_INSIDE) and p.ndim == 2}
        others = {n: p for n, p in parameters.items() if n not in muon}
        tables = {}
        if config.embedding_lr != 1:
            tables = {n: p for n, p in others.items() if n.startswith(_EMBEDDINGS)}
        rest = [p for n, p in others.items() if n not in tables]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in rest if p.ndim == 2], "weight_decay": config.weight_decay},
            {"params": [p for p in rest if p.ndim != 2], "weight_decay": 0.0},
        ]
        peaks = [config.lr, config.lr]
        if tables:
            groups.append({"params": [*tables.values()], "weight_decay": config.weight_decay})
            peaks.append(config.lr * config.embedding_lr)
        betas = (config.beta1, config.beta2)
        if config.optimizer == "lamb":
            optimizer = Lamb(groups, lr=config.lr, betas=betas, eps=config.eps)
        else:
            optimizer = torch.optim.AdamW(
                groups, lr=config.lr, betas=betas, eps=config.eps, fused=True
            )
        # Each with the peak rates of its groups.
        self._parts: list[tuple[torch.optim.Optimizer, list[float]]] = [(optimizer, peaks)]
        if muon:
            stacked = [(_matrices_in(n, parameters), p) for n, p in muon.items()]
            # Queries, keys and values first, as in the checkpoints of earlier versions.
            groups = [
                {"params": [p for parts, p in stacked if parts == each], "parts": each}
                for each in sorted({parts for parts, _ in stacked} | {1}, key=(3, 1, 2, 4).index)
            ]
            device = next(model.parameters()).device
            dtype = getattr(torch, pick_precision(config.precision, device))
            optimizer = Muon(
                groups, lr=config.muon_lr, weight_decay=config.weight_decay, dtype=dtype
            )
            self._parts.append((optimizer, [config.muon_lr] * len(groups)))

    def skip(self) -> None:
        """Clear the gradients without an update."""
        for optimizer, _ in self._parts:
            optimizer.zero_grad()

    def step(
        self,
        step: int,
        total_steps: int,
        *,
        share: float = 1.0,
        cooldown_steps: float | None = None,
    ) -> float:
        """Apply and clear the gradients at the rate of update ``step``.

        Args:
            step: The update, from 0.
            total_steps: Updates of the whole run.
            share: Factor of the rates, for a step on fewer or more tokens than usual.
            cooldown_steps: How many of them the cooldown takes; None: as configured.

        Returns:
            The rate of AdamW, or LAMB.
        """
        scale = share * lr_scale(self._config, step, total_steps, cooldown_steps)
        for optimizer, peaks in self._parts:
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * scale
            optimizer.step()
            optimizer.zero_grad()
        return self._config.lr * scale

    def tensors(self) -> dict[str, Tensor]:
        """Return what is known of each weight, as ``optimizer.{weight}.{what}``."""
        return {
            f"optimizer.{self._names[parameter]}.{what}": tensor
            for optimizer, _ in self._parts
            for parameter, known in optimizer.state.items()
            for what, tensor in known.items()
        }

    def make_room(self, stored: Iterable[str]) -> None:
        """Make room for what a checkpoint holds, given the names of its tensors."""
        states = {
            self._names[parameter]: (parameter, optimizer.state[parameter])
            for optimizer, _ in self._parts
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for full_name in stored:
            kind, _, rest = full_name.partition(".")
            name, _, what = rest.rpartition(".")
            if kind == "optimizer" and name in states:
                parameter, state = states[name]
                # AdamW counts its steps for each weight.
                state[what] = (
                    torch.zeros((), device=parameter.device)
                    if what == "step"
                    else torch.zeros_like(parameter, requires_grad=False)
                )


def _matrices_in(name: str, parameters: Mapping[str, Tensor]) -> int:
    """Return how many matrices are stacked in a parameter along its rows."""
    # Queries, keys and values; what a gate makes of one input.
    if name.endswith(("qkv_proj.weight", "gate.made_proj.weight")):
        return 3
    if name.endswith("gate.old_proj.weight"):
        return 2
    if name.endswith("inner.weight"):
        # With a gate, twice as many units go in as come out.
        outer = parameters[name.removesuffix("inner.weight") + "outer.weight"]
        return len(parameters[name]) // outer.shape[1]
    # The four gates of an LSTM.
    return 4 if name.startswith("lstm.") else 1
