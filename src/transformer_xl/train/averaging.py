"""Averages of the weights: an exponential moving one, or the plain mean of the last part."""

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from transformer_xl.config import TrainConfig


def new_average(model: nn.Module, config: TrainConfig) -> AveragedModel | None:
    """Return the average that a run keeps beside its model; None where it keeps none.

    The plain mean over the last part of a run is that of Polyak and Juditsky (1992) and of
    non-monotonically triggered averaging (Merity et al., arXiv 1708.02182) with a fixed trigger.
    """
    if config.average == "none":
        return None
    is_ema = config.average == "ema"
    mean = get_ema_multi_avg_fn(config.average_decay) if is_ema else get_swa_multi_avg_fn()
    return AveragedModel(model, multi_avg_fn=mean)


def average_start(config: TrainConfig) -> float:
    """Return the share of the training after which weights are averaged."""
    if config.average_start is not None:
        return config.average_start
    return 0.0 if config.average == "ema" else 1 - config.cooldown_fraction
