"""Activation regularization: what is added to the loss to keep outputs small and steady."""

from torch import Tensor

from transformer_xl.config import TrainConfig
from transformer_xl.model import Output


def activation_penalty(config: TrainConfig, out: Output, predicted: int) -> Tensor | float:
    r"""Return AR and TAR of a segment (Merity et al., arXiv 1708.02182).

    $$\alpha\,\mathrm{mean}(m \odot h_t)^2 + \beta\,\mathrm{mean}(h_t - h_{t-1})^2$$

    with the last layer's outputs $h$ and the dropout mask $m$. Means are over streams, positions
    and dimensions, as in the code of that paper, so that parts of equal size have as their mean
    the penalty of the whole.

    Args:
        config: The weights of the two.
        out: What the model returned.
        predicted: How many of the last positions have a target; the others are context.
    """
    penalty = 0.0
    if config.activation_reg:
        hidden = out.hidden[:, -predicted:].float()
        penalty = penalty + config.activation_reg * hidden.square().mean()
    if config.temporal_activation_reg and predicted > 1:
        changes = out.raw_hidden[:, -predicted:].float().diff(dim=1)
        penalty = penalty + config.temporal_activation_reg * changes.square().mean()
    return penalty
