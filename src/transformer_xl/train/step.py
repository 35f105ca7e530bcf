"""A training step: forward and backward pass on a segment of each stream, and the update.

Also the wrapper of the model for training: DDP, FSDP, autocast and ``torch.compile``.
"""

import gc
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from transformer_xl.config import Config, TrainConfig
from transformer_xl.config.device import pick_precision
from transformer_xl.config.distributed import World
from transformer_xl.model import LanguageModel, Memory, Output, build_model
from transformer_xl.model.pretrained import copy_weights
from transformer_xl.ops.nll import IGNORED
from transformer_xl.train.state import TrainState

# Without mixed orders of reduction, whose partial sums are added up by 48 slow kernels of a
# 12-layer model, one for each weight and bias of a layer normalization.
CAPTURED: dict[str, Any] = {"triton.cudagraphs": True, "triton.mix_order_reduction": False}


class Network:
    """The model wrapped for training with one or several processes.

    Every process reads its own streams. With ``ddp`` (Li et al., PyTorch Distributed, 2020), each
    holds the whole model, and gradients are averaged during the backward pass. With ``fsdp`` (Zhao
    et al., PyTorch FSDP, 2023), each holds a shard of every weight, gradient and optimizer state,
    and a layer is gathered when needed; all other parameters are another unit, which is not
    resharded between forward and backward pass.

    The model comes from :func:`shard`.
    """

    def __init__(self, model: LanguageModel, settings: TrainConfig, world: World) -> None:
        self._module: Any = model
        precision = pick_precision(settings.precision, model.device)
        self._device, self._is_rounded = model.device.type, precision != "float32"
        self._dtype = getattr(torch, precision)
        # With FSDP, gathering and resharding stay outside of the compiled code.
        by_layers = settings.compile == "layers" or isinstance(model, FSDPModule)
        is_replayed = replays_steps(model, settings, world)
        self._is_whole = bool(settings.compile) and not by_layers
        self._replays_whole = self._is_whole and is_replayed
        self._layers: list[tuple[Any, Any]] = []
        self._captures: _Captures | None = None
        if settings.compile and by_layers:
            # Alike, so that the compiler has the code of the others when it has that of one.
            self._layers = [(x, torch.compile(x.forward, dynamic=False)) for x in _layers(model)]
            if is_replayed:
                self._captures = _Captures(model, settings)
        elif settings.compile:
            # With static shapes, a resumed run compiles the same code and gives the same bits. Only
            # full memories are passed to it, so there is one shape.
            options = CAPTURED if is_replayed else None
            self._module = torch.compile(model, dynamic=False, options=options)
        if world.size > 1 and not isinstance(model, FSDPModule):
            self._module = DistributedDataParallel(self._module, gradient_as_bucket_view=True)

    def __call__(self, *arguments: Any, is_compiled: bool, **options: Any) -> Output:
        """Call the model; with ``is_compiled`` False, eagerly even if it is compiled."""
        # A replay would read the weights that autocast had rounded and cached at the capture.
        caches = not is_compiled or self._captures is None
        rounded = {"enabled": self._is_rounded, "cache_enabled": caches}
        with torch.autocast(self._device, self._dtype, **rounded):
            if is_compiled and self._replays_whole:
                return self._replayed(*arguments, **options)
            if is_compiled and self._captures is not None:
                return self._captures(*arguments, **options)
            if is_compiled or not self._is_whole:
                return self._module(*arguments, **options)
            # Only here, as it imports the compiler, which takes seconds.
            with torch.compiler.set_stance("force_eager"):
                return self._module(*arguments, **options)

    def _replayed(self, *arguments: Any, **options: Any) -> Output:
        """Call the compiled model, whose passes are captured as CUDA graphs."""
        torch.compiler.cudagraph_mark_step_begin()
        out = self._module(*arguments, **options)
        # The next replay overwrites its results.
        return replace(out, mems=out.mems.clone())

    @contextmanager
    def compiles_layers(self, is_compiled: bool) -> Iterator[None]:
        """Compile the layers, if they are compiled one by one, inside a ``with`` block.

        It is for a forward and backward pass, as the latter may recompute activations; evaluation
        calls the layers as they are.
        """
        layers = self._layers if is_compiled else []
        for layer, forward in layers:
            layer.forward = forward
        try:
            yield
        finally:
            for layer, _ in layers:
                del layer.forward

    def shares_gradients(self, is_last: bool) -> AbstractContextManager:
        """Return a context for a forward and backward pass; the last of a step syncs gradients."""
        if isinstance(self._module, FSDPModule):
            self._module.set_requires_gradient_sync(is_last)
        elif isinstance(self._module, DistributedDataParallel) and not is_last:
            return self._module.no_sync()
        return nullcontext()


def replays_steps(model: LanguageModel, settings: TrainConfig, world: World) -> bool:
    """Whether a GPU replays the passes of steps with a full memory as CUDA graphs."""
    # Gradients that are summed over parts, or processes, would lie in the memory of a graph.
    is_alone = world.size == 1 and settings.accumulate == 1
    if not settings.compile or not is_alone or model.device.type != "cuda":
        return False
    config = model.config
    varies = settings.recompute or settings.reset_memory or config.n_features
    has_documents, has_clusters = config.reset_at is not None, config.cutoffs or config.div_val > 1
    # The compiler replays the graphs between what cannot be captured; captured as a whole, a pass
    # must not wait for the device, nor depend on where documents begin.
    return settings.compile is True or not (varies or has_documents or has_clusters)


class _Pass(nn.Module):
    """A pass through a model whose arguments and results are tensors, as captures need them."""

    def __init__(self, model: LanguageModel, has_penalty: bool, lengths: dict[str, int]) -> None:
        super().__init__()
        self._model, self._has_penalty, self._lengths = model, has_penalty, lengths

    def forward(self, tokens: Tensor, targets: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        """Return the loss of each target, the memory, and the hidden states twice."""
        out = self._model(tokens, Memory(states.unbind()), targets, **self._lengths)
        assert out.mems.forgotten is None
        hidden = out.hidden, out.raw_hidden
        if not self._has_penalty:
            # Without a penalty they have no gradient.
            hidden = [x.detach() for x in hidden]
        return out.nll, torch.stack(out.mems.states), *hidden


class _Captures:
    """The two passes of a step on a GPU, captured as CUDA graphs when they are first called."""

    def __init__(self, model: LanguageModel, settings: TrainConfig) -> None:
        self._model = model
        self._has_penalty = bool(settings.activation_reg or settings.temporal_activation_reg)
        self._key: Any = None
        self._replay: Callable[..., tuple[Tensor, ...]] | None = None

    def __call__(
        self,
        tokens: Tensor,
        mems: Memory,
        targets: Tensor,
        *,
        starts: Tensor | None,
        **lengths: int,
    ) -> Output:
        """Return what the model does; the next call overwrites all of it but the memory."""
        if starts is not None or mems.forgotten is not None:
            return self._model(tokens, mems, targets, starts=starts, **lengths)
        given = tokens, targets, torch.stack(mems.states)
        key = [x.shape for x in given], lengths
        if self._replay is None or key != self._key:
            self._replay, self._key = None, key
            # The graphs of another shape refer to themselves, and would keep their memory.
            gc.collect()
            self._replay = self._captured(given, lengths)
        nll, states, hidden, raw_hidden = self._replay(*given)
        mems = Memory(states.detach().clone().unbind())
        return Output(hidden=hidden, raw_hidden=raw_hidden, mems=mems, nll=nll, targets=targets)

    def _captured(
        self, given: tuple[Tensor, ...], lengths: dict[str, int]
    ) -> Callable[..., tuple[Tensor, ...]]:
        network = _Pass(self._model, self._has_penalty, lengths)
        # Warm-up calls draw masks of dropout; a resumed run makes them at another step.
        drawn = torch.cuda.get_rng_state(given[0].device)
        # Graphs are captured on a stream of their own, and replayed on that of the training.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        capture: Any = torch.cuda.make_graphed_callables
        captured = capture(network, given, allow_unused_input=True)
        torch.cuda.set_rng_state(drawn, given[0].device)
        return captured


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
    layers = _layers(model)
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


def _layers(model: nn.Module) -> list[Any]:
    return list(getattr(model, "layers", ()))


def activation_penalty(config: TrainConfig, out: Output, predicted: int) -> Tensor | float:
    r"""Return AR and TAR of a segment (Merity et al., arXiv 1708.02182).

    $$\alpha\,\mathrm{mean}(m \odot h_t)^2 + \beta\,\mathrm{mean}(h_t - h_{t-1})^2$$

    with the last layer's outputs $h$ and the dropout mask $m$. Means are over streams, positions
    and dimensions, as in the code of that paper, so that the penalty of a batch is the mean of
    those of equal parts. Only the last ``predicted`` positions have a target; the others are
    context.
    """
    penalty = 0.0
    if config.activation_reg:
        hidden = out.hidden[:, -predicted:].float()
        penalty = penalty + config.activation_reg * hidden.square().mean()
    if config.temporal_activation_reg and predicted > 1:
        changes = out.raw_hidden[:, -predicted:].float().diff(dim=1)
        penalty = penalty + config.temporal_activation_reg * changes.square().mean()
    return penalty


_RESET = 0x7265736574
"""The first number of the seed of resets; random numbers for other uses have none."""
KNOWN_AFTER = 20
"""Updates after which the running mean of the gradient norm is reliable."""
_KEPT = 0.98


class Update(NamedTuple):
    """The result of a step."""

    loss: Tensor
    """Mean loss of the streams of this process, in nats per token."""
    lr: float
    offset: int
    """Start of its segments, in tokens from the beginning of each stream."""
    norm: float
    """Norm of the gradient before clipping."""
    is_skipped: bool
    is_counted: bool = True
    """Whether any target of its segments counts, in any process."""


def train_step(config: Config, state: TrainState, network: Network) -> Update:
    """Make one update, or skip it if the norm of its gradient is not finite or too large.

    A skipped update changes neither weights nor memory: the streams advance, and the memory lacks a
    segment.

    Raises:
        RuntimeError: More than ``max_skips`` updates in a row were skipped.
    """
    settings, device, parts = config.train, state.model.device, config.train.accumulate
    mem_len, scale = config.model.mem_len, 1.0
    if state.has_varying_lengths:
        mem_len, scale = state.next_lengths(config)
    offset = state.segments.offset
    tokens, targets = state.segments.next_segment()
    state.tokens += targets.numel() * state.world.size
    tokens, targets = _moved(tokens, device), _moved(targets, device)
    starts = state.segments.starts
    starts = [None] * parts if starts is None else _moved(starts, device).chunk(parts)
    weights, is_counted = _loss_weights(state, settings)
    if settings.loss == "half":
        targets = targets[:, targets.shape[1] // 2 :]
    if weights is not None:
        # The softmax is not computed for them.
        ignored = torch.nan if targets.is_floating_point() else IGNORED
        targets = targets.masked_fill(weights == 0, ignored)
    lengths = {"mem_len": mem_len, "context": tokens.shape[1] - targets.shape[1]}
    remembered = _partly_reset(state, settings)
    loss, mems = torch.zeros((), device=device), []
    for i, (part, part_targets) in enumerate(
        zip(tokens.chunk(parts), targets.chunk(parts), strict=True)
    ):
        # Each length of a memory that is filling up would be compiled separately.
        memory = remembered[i]
        is_full = memory is not None and len(memory) == mem_len
        with network.compiles_layers(is_full), network.shares_gradients(i == parts - 1):
            options = lengths | {"starts": starts[i]}
            out = network(part, memory, part_targets, is_compiled=is_full, **options)
            assert out.nll is not None
            nll = out.nll if weights is None else out.nll * weights.chunk(parts)[i]
            objective = part_loss = nll.mean() / parts
            if settings.activation_reg or settings.temporal_activation_reg:
                penalty = activation_penalty(settings, out, part_targets.shape[1])
                objective = part_loss + penalty / parts
            if state.loss_scale != 1:
                objective = objective * state.loss_scale
            objective.backward()
        mems.append(out.mems)
        loss += part_loss.detach()

    learned = [p for p in state.model.parameters() if p.grad is not None]
    gradients = [p.grad for p in learned if p.grad is not None]
    if state.loss_scale != 1:
        torch._foreach_mul_(gradients, 1 / state.loss_scale)  # pyright: ignore[reportPrivateImportUsage]
    length = get_total_norm(gradients)
    length = length.full_tensor() if isinstance(length, DTensor) else length
    # Synchronizes the device, which is cheaper than corrupting the weights. The norm is that over
    # all processes, so all of them decide alike.
    norm, limit = float(length), math.inf
    state.adapt_loss_scale(settings, is_finite=math.isfinite(norm))
    if settings.skip_norm and state.step - state.skipped - state.uncounted >= KNOWN_AFTER:
        limit = settings.skip_norm * (state.usual_norm or math.inf)
    if not math.isfinite(norm) or norm > limit:
        _skip(norm, loss, offset, settings, state)
        return Update(loss, 0.0, offset, norm, is_skipped=True)
    state.skipped_in_a_row = 0
    if is_counted:
        state.usual_norm = running_mean(state.usual_norm, norm)
    else:
        # Without a loss, the norm is 0, or that of a penalty: neither says what is usual.
        state.uncounted += 1
    state.mems = mems
    if settings.clip_norm:
        clip_grads_with_norm_(learned, settings.clip_norm, length)
    scale *= state.lr_scale(settings)
    state.optimizer.step(scale)
    state.step += 1
    state.add_to_average(settings)
    return Update(loss, settings.lr * scale, offset, norm, is_skipped=False, is_counted=is_counted)


def _loss_weights(state: TrainState, settings: TrainConfig) -> tuple[Tensor | None, bool]:
    """Return the weight of the loss of each target, 1 on average over all processes; None: all 1.

    Also whether any is above 0, in any process: without a completion in the segments, and without
    ``prompt_loss_weight``, all are 0.
    """
    completed = state.segments.completed
    if completed is None:
        return None, True
    if settings.loss == "half":
        completed = completed[:, completed.shape[1] // 2 :]
    weights = completed.float().clamp(min=settings.prompt_loss_weight)
    (mean,) = state.world.mean([float(weights.mean())])
    return _moved(weights / mean if mean else weights, state.model.device), mean > 0


def _partly_reset(state: TrainState, settings: TrainConfig) -> list[Memory | None]:
    """Return the memory, reset for random streams; the draw covers those of all processes."""
    if not settings.reset_memory:
        return state.mems
    numbers = np.random.default_rng([_RESET, settings.seed, state.step])
    drawn = numbers.random(settings.batch_size) < settings.reset_memory
    own = np.split(drawn[state.world.rows(settings.batch_size)], len(state.mems))
    # Also where no stream is reset: a checkpoint has the masks of all parts and processes or none.
    return [
        None if memory is None else memory.reset(torch.from_numpy(rows))
        for memory, rows in zip(state.mems, own, strict=True)
    ]


def running_mean(before: float | None, value: float) -> float:
    """Update an exponential moving average, which is None before the first value.

    Earlier versions stored 0 where no target had counted yet, which is no value either.
    """
    return _KEPT * before + (1 - _KEPT) * value if before else value


def _skip(norm: float, loss: Tensor, offset: int, settings: TrainConfig, state: TrainState) -> None:
    state.optimizer.skip()
    state.step += 1
    state.skipped += 1
    # Overflows are how a dynamic loss scale finds its value; a loss that is not finite lowers it to
    # below 1, and counts from there on.
    is_overflow = not math.isfinite(norm) and state.is_finding_scale(settings)
    state.skipped_in_a_row += not is_overflow
    if state.skipped_in_a_row > settings.max_skips:
        raise diverged(
            state.step,
            f"{state.skipped_in_a_row} updates in a row were left out (train.max_skips="
            f"{settings.max_skips}): the norm of the gradient is {norm}, the loss {float(loss)}, "
            f"on segments that begin {offset:,} tokens into each stream,",
        )


class Diverged(RuntimeError):  # noqa: N818  (what happened, as `Interrupted`)
    """The training diverged."""


def diverged(step: int, what: str) -> Diverged:
    """Return the error for a run that diverged."""
    return Diverged(
        f"{what} after step {step}: lower train.lr or train.clip_norm, or raise "
        "train.warmup_steps; the checkpoints before it are intact"
    )


def _moved(x: Tensor, device: torch.device) -> Tensor:
    # Copies from pinned memory are asynchronous; the buffer is not reused before they are done.
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
