"""Averages of the weights: an exponential moving one, or the plain mean of the last part."""

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from transformer_xl.config import TrainConfig


def new_average(model: nn.Module, config: TrainConfig) -> AveragedModel | None:
    """Return the average that a run keeps beside its model; None where it keeps none.

    The plain mean over the last part of a run is that of Polyak and Juditsky (1992) and of
    non-monotonically triggered averaging (Merity et al., arXiv 1708.02182) with a fixed trigger.
    """
    if config.average == "none":
        return None
    return _Average(model, config.average_decay if config.average == "ema" else None)


class _Average(AveragedModel):
    """The average of PyTorch, which need not tell the device how many weights were averaged.

    That is a copy which a GPU is waited for, at each step.

    Args:
        model: What is averaged.
        decay: Share of the average that a step leaves of it. None: the plain mean.
    """

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        super().__init__(model)
        self._decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Take the present weights into the average."""
        n = int(self.n_averaged)
        averaged: list[Tensor] = [*self.module.parameters()]
        present: list[Tensor] = [*model.parameters()]
        if n == 0:
            for mean, weight in zip(averaged, present, strict=True):
                mean.copy_(weight)
        else:
            share = 1 / (n + 1) if self._decay is None else 1 - self._decay
            torch._foreach_lerp_(averaged, present, share)  # pyright: ignore[reportPrivateImportUsage]
        for kept, own in zip(self.module.buffers(), model.buffers(), strict=True):
            kept.copy_(own)
        self.n_averaged += 1


def average_start(config: TrainConfig) -> float:
    """Return the share of the training after which weights are averaged."""
    if config.average_start is not None:
        return config.average_start
    return 0.0 if config.average == "ema" else 1 - config.cooldown_fraction
