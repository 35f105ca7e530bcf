"""The initial weights: the one table of all initializations (the authors')."""

import re

import torch
from torch import nn

from transformer_xl.config import ModelConfig
from transformer_xl.model.gate import GATE_BIAS


@torch.no_grad()
def init_weights(model: nn.Module, config: ModelConfig) -> None:
    """Draw the initial weights of a model by the names of its parameters."""
    table = (
        # (names end in, mean, standard deviation)
        (("norm.weight",), 1.0, config.init_std),
        (("gate.bias",), GATE_BIAS, 0.0),
        (("norm.bias", "inner.bias", "outer.bias", "softmax.bias"), 0.0, 0.0),
        (("cluster_bias", "distance_bias"), 0.0, 0.0),
        (("embedding.proj.weight", "softmax.proj.weight"), 0.0, config.proj_init_std),
        (("_proj.weight", "inner.weight", "outer.weight"), 0.0, config.init_std),
        (("embedding.weight", "softmax.weight", "cluster_weight"), 0.0, config.init_std),
        (("content_bias", "position_bias"), 0.0, config.init_std),
        (("distance_embedding", "position_embedding"), 0.0, config.init_std),
    )
    for name, parameter in model.named_parameters():
        # What each cluster has one of is numbered.
        name = re.sub(r"weights\.\d+", "weight", re.sub(r"projs\.\d+", "proj", name))
        mean, std = next((m, s) for ends, m, s in table if name.endswith(ends))
        # To draw nothing for shapes alone, torch would import its compiler.
        if not parameter.is_meta:
            parameter.normal_(mean, std)
