"""One update: a segment of each stream forward and backward, and the weights moved.

Also the model as it is called for that: in one process or in many, compiled or not.
"""

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from transformer_xl.config import Config, TrainConfig
from transformer_xl.config.device import autocast, pick_precision
from transformer_xl.config.distributed import World
from transformer_xl.model import Output
from transformer_xl.train.state import TrainState


class Network:
    """The model as training calls it: in one process, or in many that share its gradients.

    Every process reads streams of its own. What they share:

    * ``ddp``: each holds the whole model; gradients are averaged while the backward pass goes on
      (Li et al., PyTorch Distributed, 2020).
    * ``fsdp``: each holds a part of every weight, of its gradient and of what the optimizer knows
      of it; a layer is put together when it is needed (Zhao et al., PyTorch FSDP, 2023). The
      layers are units; embedding, softmax and what belongs to no layer are one more, which stays
      together from the forward to the backward pass.

    The model knows nothing of it.

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


KNOWN_AFTER = 20
"""Updates after which it is known how long a gradient usually is."""
_KEPT = 0.98


class Update(NamedTuple):
    """What became of a step."""

    loss: Tensor
    """Of the streams of this process, in nats per token."""
    lr: float
    """Learning rate; 0 where nothing was learned."""
    offset: int
    """Where its segments begin: tokens from the beginning of each stream."""
    norm: float
    """Norm of the gradient, before it was clipped."""
    is_skipped: bool
    """Whether the update was left out."""


def train_step(config: Config, state: TrainState, network: Network) -> Update:
    """Make one update, or leave it out because its gradient is not finite or too long.

    An update that is left out moves neither weights nor what is remembered: the streams go on, and
    the memory lacks one segment.

    Raises:
        RuntimeError: More updates in a row were left out than ``max_skips``.
    """
    settings, device = config.train, state.model.device
    segment_len, mem_len = state.next_lengths(config)
    offset = state.segments.offset
    tokens, targets = (_moved(x, device) for x in state.segments.next_segment())
    state.tokens += targets.numel() * state.world.size
    if settings.loss == "half":
        targets = targets[:, targets.shape[1] // 2 :]
    context = tokens.shape[1] - targets.shape[1]
    parts = settings.accumulate
    loss, mems = torch.zeros((), device=device), []
    for i, (part, part_targets) in enumerate(
        zip(tokens.chunk(parts), targets.chunk(parts), strict=True)
    ):
        # Of the lengths that a memory has while it fills up, each would be compiled for itself.
        memory = state.mems[i]
        is_full = memory is not None and len(memory) == mem_len
        lengths = {"mem_len": mem_len, "context": context}
        with network.shares_gradients(i == parts - 1):
            with autocast(settings.precision, device):
                out = network(part, memory, part_targets, is_compiled=is_full, **lengths)
                assert out.nll is not None
                part_loss = out.nll.mean() / parts
                penalty = activation_penalty(settings, out, part_targets.shape[1])
            (part_loss + penalty / parts).backward()
        mems.append(out.mems)
        loss += part_loss.detach()

    weights = [p for p in state.model.parameters() if p.grad is not None]
    length = get_total_norm([p.grad for p in weights if p.grad is not None])
    length = length.full_tensor() if isinstance(length, DTensor) else length
    # Here the device is waited for, which is cheaper than weights that are lost.
    norm = float(length)
    if not _is_usual(norm, settings, state):
        _skip(norm, loss, offset, settings, state)
        return Update(loss, 0.0, offset, norm, is_skipped=True)
    state.skipped_in_a_row = 0
    state.usual_norm = running_mean(state.usual_norm, norm)
    state.mems = mems
    if settings.clip_norm:
        clip_grads_with_norm_(weights, settings.clip_norm, length)
    usual_len = settings.segment_len
    if settings.stages:
        usual_len = settings.stages[state.stage][1]
    # Else short segments would have more of a say for each of their tokens than long ones.
    share = segment_len / usual_len if settings.random_segment_len else 1.0
    lr = state.optimizer.step(
        state.step, state.total_steps, share=share, cooldown_steps=state.cooldown_steps
    )
    state.step += 1
    state.add_to_average(settings)
    return Update(loss, lr, offset, norm, is_skipped=False)


def running_mean(before: float | None, value: float) -> float:
    """Return the mean of the latest values, each counting less than the one after it."""
    return value if before is None else _KEPT * before + (1 - _KEPT) * value


def _is_usual(norm: float, settings: TrainConfig, state: TrainState) -> bool:
    # The gradient of all processes, so that all decide alike.
    if not math.isfinite(norm):
        return False
    is_known = state.usual_norm is not None and state.step - state.skipped >= KNOWN_AFTER
    if not (settings.skip_norm and is_known):
        return True
    assert state.usual_norm is not None
    return norm <= settings.skip_norm * state.usual_norm


def _skip(norm: float, loss: Tensor, offset: int, settings: TrainConfig, state: TrainState) -> None:
    state.optimizer.skip()
    state.step += 1
    state.skipped += 1
    state.skipped_in_a_row += 1
    if state.skipped_in_a_row > settings.max_skips:
        raise diverged(
            state.step,
            f"{state.skipped_in_a_row} updates in a row were left out (train.max_skips="
            f"{settings.max_skips}): the norm of the gradient is {norm}, the loss {float(loss)}, "
            f"on segments that begin {offset:,} tokens into each stream,",
        )


def diverged(step: int, what: str) -> RuntimeError:
    """Return the error for a run that cannot be saved by going on."""
    return RuntimeError(
        f"{what} after step {step}: lower train.lr or train.clip_norm, or raise "
        "train.warmup_steps; the checkpoints before it are intact"
    )


def _moved(x: Tensor, device: torch.device) -> Tensor:
    # From pinned memory the copy waits for nothing; its room is not used again before it is done.
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
