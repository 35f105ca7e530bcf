"""A model whose weights are sharded over processes (FSDP)."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from transformer_xl.config import Config, TrainConfig
from transformer_xl.config.device import pick_precision
from transformer_xl.config.distributed import World
from transformer_xl.model import LanguageModel, build_model
from transformer_xl.model.pretrained import copy_weights


def shard(model: nn.Module, settings: TrainConfig, world: World, device: torch.device) -> None:
    """Shard the weights of a model over the processes, if the settings say so.

    In bfloat16 or float16, weights are gathered in that precision, and gradients are reduced in
    float32; the sharded weights stay in float32.
    """
    if settings.parallel != "fsdp" or world.size == 1:
        return
    # Harmless, as outputs of the model are not modified in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    policy = MixedPrecisionPolicy()
    if (precision := pick_precision(settings.precision, device)) != "float32":
        rounded = getattr(torch, precision)
        policy = MixedPrecisionPolicy(
            param_dtype=rounded, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    how: dict[str, Any] = {"mesh": world.mesh, "mp_policy": policy}
    layers = layers_of(model)
    # Positions are projected for all layers before the first one is called.
    if projections := [x.attention.r_proj for x in layers if hasattr(x.attention, "r_proj")]:
        fully_shard(projections, **how, reshard_after_forward=False)
    for each in (*layers, model):
        fully_shard(each, **how)


def whole_model(model: LanguageModel, config: Config, world: World) -> LanguageModel:
    """Return an unsharded model in the first process. Collective: call on every rank."""
    if not isinstance(model, FSDPModule):
        return model
    weights = {}
    # Gathered one by one on the CPU.
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if world.is_first:
            weights[name] = weight.cpu()
    if not world.is_first:
        return model
    # Building the model draws initial weights, which must not advance the generator of training.
    with torch.random.fork_rng(devices=[]):
        whole = build_model(config.model)
    copy_weights(whole, weights)
    return whole.to(model.device)


def layers_of(model: nn.Module) -> list[Any]:
    """Return the layers of a model; none of one that has no list of them."""
    return list(getattr(model, "layers", ()))
