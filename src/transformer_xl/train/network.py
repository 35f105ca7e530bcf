"""The model as training calls it: in one process, or in many that share its gradients.

Every process reads streams of its own. What they share:

* ``ddp``: each holds the whole model; gradients are averaged while the backward pass goes on
  (Li et al., PyTorch Distributed, 2020).
* ``fsdp``: each holds a part of every weight, of its gradient and of what the optimizer knows of
  it; a layer is put together when it is needed (Zhao et al., PyTorch FSDP, 2023). The layers are
  units; embedding, softmax and what belongs to no layer are one more, which stays together from
  the forward to the backward pass.

The model knows nothing of it.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from transformer_xl.config import TrainConfig
from transformer_xl.config.device import pick_precision
from transformer_xl.config.distributed import World
from transformer_xl.model import Output


class Network:
    """Calls the model, and lets the gradients of the last call in a step be shared.

    Args:
        model: The model, which is sharded already where it is to be (:func:`shard`).
        settings: How it is trained.
        world: The processes that train it.
    """

    def __init__(self, model: nn.Module, settings: TrainConfig, world: World) -> None:
        self._module: nn.Module = model
        self._has_compiler = settings.compile
        if settings.compile and isinstance(model, FSDPModule):
            # What puts a layer together and takes it apart stays outside.
            for layer in _layers(model):
                layer.forward = torch.compile(layer.forward, dynamic=False)
        elif settings.compile:
            # Without dynamic shapes, a resumed run compiles what the first one did, to the same
            # bits; and as only full memories come to it, there is one shape.
            self._module = _compiled(model)
        if world.size > 1 and not isinstance(model, FSDPModule):
            self._module = DistributedDataParallel(self._module, gradient_as_bucket_view=True)

    def __call__(self, *arguments: Any, is_compiled: bool, **options: Any) -> Output:
        """Call the model; compiled, if it is at all and ``is_compiled``."""
        if is_compiled or not self._has_compiler:
            return self._module(*arguments, **options)
        # Only here, as it loads the compiler, which takes seconds.
        with torch.compiler.set_stance("force_eager"):
            return self._module(*arguments, **options)

    def shares_gradients(self, is_last: bool) -> AbstractContextManager:
        """Return a context for a forward and backward pass; the last of a step shares gradients."""
        if isinstance(self._module, FSDPModule):
            self._module.set_requires_gradient_sync(is_last)
        elif isinstance(self._module, DistributedDataParallel) and not is_last:
            return self._module.no_sync()
        return nullcontext()


def shard(model: nn.Module, settings: TrainConfig, world: World, device: torch.device) -> None:
    """Divide the weights of a model over the processes, where the settings ask for it.

    Under bfloat16, weights are put together in bfloat16, and gradients summed in float32; the
    weights that are kept are float32.
    """
    if settings.parallel != "fsdp" or world.size == 1:
        return
    # Nothing is written into what the model returns.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    policy = MixedPrecisionPolicy()
    if pick_precision(settings.precision, device) == "bfloat16":
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    how: dict[str, Any] = {"mesh": world.mesh, "mp_policy": policy}
    layers = _layers(model)
    # Positions are projected for all layers before the first one is called.
    if projections := [x.attention.r_proj for x in layers if hasattr(x.attention, "r_proj")]:
        fully_shard(projections, **how, reshard_after_forward=False)
    for layer in layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)


def whole_weights(model: nn.Module, world: World) -> dict[str, Tensor]:
    """Put the weights of a model together, each once and one after the other.

    All processes must call this; the first one gets them, in the memory of the processor.
    """
    found = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if world.is_first:
            found[name] = whole.cpu()
    return found


def _layers(model: nn.Module) -> list[Any]:
    return list(getattr(model, "layers", ()))


def _compiled(model: nn.Module) -> nn.Module:
    compiled: Callable[..., Any] = torch.compile(model, dynamic=False)
    assert isinstance(compiled, nn.Module)
    return compiled
