"""Optimizers and learning rates as functions of the step."""

import math
from typing import Any

import torch
from torch import nn

from transformer_xl.config import TrainConfig
from transformer_xl.train.muon import Muon


def lr_scale(config: TrainConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of the update ``step`` (from 0), as a share of the peak.

    A linear warm-up, then the schedule. The first update already moves the weights: with W
    warm-up steps, update s < W runs at (s + 1) / (W + 1).
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
    cooldown = config.cooldown_fraction * total_steps
    left = (total_steps - step) / cooldown if cooldown else 1.0
    return floor + (1 - floor) * min(1.0, left)


class Optimizer:
    """One or two optimizers that are stepped as one.

    Matrices decay, vectors (biases, norms) do not. With Muon, the matrices inside the layers
    belong to Muon, and the embeddings, the softmax and all vectors to AdamW.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self._config = config
        parameters = dict(model.named_parameters())
        muon = {}
        if config.optimizer == "muon":
            muon = {n: p for n, p in parameters.items() if n.startswith("layers.") and p.ndim == 2}
        others = [p for n, p in parameters.items() if n not in muon]
        decays = [p for p in others if p.ndim == 2]
        stays = [p for p in others if p.ndim != 2]
        adamw = torch.optim.AdamW(
            [
                {"params": decays, "weight_decay": config.weight_decay},
                {"params": stays, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self._parts: list[tuple[torch.optim.Optimizer, float]] = [(adamw, config.lr)]
        if muon:
            qkv = [p for n, p in muon.items() if n.endswith("qkv_proj.weight")]
            single = [p for n, p in muon.items() if not n.endswith("qkv_proj.weight")]
            groups = [{"params": qkv, "parts": 3}, {"params": single}]
            optimizer = Muon(groups, lr=config.muon_lr, weight_decay=config.weight_decay)
            self._parts.append((optimizer, config.muon_lr))

    def step(self, step: int, total_steps: int) -> float:
        """Apply and clear the gradients at the rate of update ``step``; return AdamW's rate."""
        scale = lr_scale(self._config, step, total_steps)
        for optimizer, peak in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = peak * scale
            optimizer.step()
            optimizer.zero_grad()
        return self._config.lr * scale

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every part."""
        return {"parts": [optimizer.state_dict() for optimizer, _ in self._parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for (optimizer, _), saved in zip(self._parts, state["parts"], strict=True):
            optimizer.load_state_dict(saved)
