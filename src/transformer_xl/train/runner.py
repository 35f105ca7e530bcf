"""How training calls the model: in one or several processes, eagerly, compiled, or replayed."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from transformer_xl.config import Config, Precision, TrainConfig, World
from transformer_xl.model import LanguageModel, Memory, Output, build_model

# Without mixed orders of reduction, whose partial sums are added up by 48 slow kernels of a
# 12-layer model, one for each weight and bias of a layer normalization.
CAPTURED: dict[str, str | int | bool | Callable] = {
    "triton.cudagraphs": True,
    "triton.mix_order_reduction": False,
}
Replay = Callable[..., tuple[Tensor, ...]]


class Network:
    """The model as a training step calls it.

    Every process reads its own streams. With ``ddp`` (Li et al., PyTorch Distributed, 2020), each
    holds the whole model, and gradients are averaged during the backward pass. With ``fsdp`` (Zhao
    et al., PyTorch FSDP, 2023), each holds a shard of every weight, gradient and optimizer state,
    and a layer is gathered when needed; all other parameters are another unit, which is not
    resharded between forward and backward pass.

    Segments with a full memory are read by compiled code, if the settings say so: each length of a
    memory that fills up would be compiled separately. The code replaces the ``forward`` of the
    model, or of its layers, during the forward and backward pass, which may recompute activations;
    evaluation calls the modules as they are.

    Args:
        model: The model, from :func:`shard`.
        settings: Precision, compilation and penalties.
        world: The processes.
    """

    def __init__(self, model: LanguageModel, settings: TrainConfig, world: World) -> None:
        precision = Precision(settings.precision, model.device).name
        self._device, self._is_rounded = model.device.type, precision != "float32"
        self._dtype = getattr(torch, precision)
        self._module: nn.Module = model
        if world.size > 1 and not isinstance(model, FSDPModule):
            self._module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        is_replayed = replays_steps(model, settings, world)
        self._compiled: dict[nn.Module, Callable[..., object]] = {}
        self._graphs: StepGraphs | None = None
        # With FSDP, gathering and resharding stay outside of the compiled code.
        if settings.compile == "layers" or (settings.compile and isinstance(model, FSDPModule)):
            # Alike, so that the compiler has the code of the others when it has that of one.
            self._compiled = {x: torch.compile(x.forward, dynamic=False) for x in layers_of(model)}
            if is_replayed:
                has_penalty = bool(settings.activation_reg or settings.temporal_activation_reg)
                self._graphs = StepGraphs(model, has_penalty)
        elif settings.compile:
            # With static shapes, a resumed run compiles the same code and gives the same bits.
            options = CAPTURED if is_replayed else None
            forward = torch.compile(model.forward, dynamic=False, options=options)
            self._compiled = {model: _replayed(forward) if is_replayed else forward}

    @contextmanager
    def running(
        self,
        tokens: Tensor,
        mems: Memory | None,
        targets: Tensor,
        *,
        starts: Tensor | None,
        mem_len: int,
        context: int,
        is_last: bool = True,
    ) -> Iterator[Output]:
        """Call the model on a segment of each stream; the backward pass belongs in the block.

        Args:
            tokens: Tokens (B, T), or features (B, T, n_features).
            mems: Memory of the segments before.
            targets: Targets (B, T - context).
            starts: Mask (B, T) of where recordings begin, with features.
            mem_len: Length of a full memory.
            context: Number of the first tokens that have no target.
            is_last: Whether the gradients of the step are complete after this segment, and so are
                averaged over the processes.

        Yields:
            The output of the model. Replayed graphs overwrite all of it but its memory in the next
            call.
        """
        call: Callable[..., Output] = self._module
        is_full = mems is not None and len(mems) == mem_len
        has_masks = starts is not None or (mems is not None and mems.forgotten is not None)
        # A graph has only the tensors of its capture.
        if self._graphs and is_full and not has_masks:
            call = self._graphs
        # A replay would read the weights that autocast had rounded and cached at the capture.
        rounded = {"enabled": self._is_rounded, "cache_enabled": call is not self._graphs}
        with self._compiled_forward(is_full), self._shares_gradients(is_last):
            with torch.autocast(self._device, self._dtype, **rounded):
                out = call(tokens, mems, targets, starts=starts, mem_len=mem_len, context=context)
            yield out

    @contextmanager
    def _compiled_forward(self, is_used: bool) -> Iterator[None]:
        modules = self._compiled if is_used else {}
        for module, forward in modules.items():
            module.forward = forward
        try:
            yield
        finally:
            for module in modules:
                del module.forward

    def _shares_gradients(self, is_last: bool) -> AbstractContextManager:
        """Return a context for a forward and backward pass; the last of a step syncs gradients."""
        if isinstance(self._module, FSDPModule):
            self._module.set_requires_gradient_sync(is_last)
        elif isinstance(self._module, DistributedDataParallel) and not is_last:
            return self._module.no_sync()
        return nullcontext()


class StepGraphs:
    """The two passes of a step on a GPU, captured as CUDA graphs in the first call, then replayed.

    Args:
        model: The model, whose layers are compiled.
        has_penalty: Whether the hidden states have a gradient, that of a penalty.
    """

    def __init__(self, model: nn.Module, has_penalty: bool) -> None:
        self._model, self._has_penalty = model, has_penalty
        self._key: object = None
        self._replay: Replay | None = None

    def __call__(
        self,
        tokens: Tensor,
        mems: Memory | None,
        targets: Tensor,
        *,
        starts: Tensor | None,
        **lengths: int,
    ) -> Output:
        """Return the output of the model; the next call overwrites all of it but the memory."""
        assert mems is not None
        assert starts is None
        arguments = tokens, targets, torch.stack(mems.states)
        key = [x.shape for x in arguments], lengths
        if self._replay is None or key != self._key:
            self._replay, self._key = None, key
            # The graphs of another shape refer to themselves, and would keep their memory.
            gc.collect()
            self._replay = self._captured(arguments, lengths)
        nll, states, hidden, raw_hidden = self._replay(*arguments)
        mems = Memory(states.detach().clone().unbind())
        return Output(hidden=hidden, raw_hidden=raw_hidden, mems=mems, nll=nll, targets=targets)

    def _captured(self, arguments: tuple[Tensor, ...], lengths: dict[str, int]) -> Replay:
        # Warm-up calls draw masks of dropout; a resumed run makes them at another step.
        drawn = torch.cuda.get_rng_state(arguments[0].device)
        # Graphs are captured on a stream of their own, and replayed on that of the training.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        capture: Any = torch.cuda.make_graphed_callables
        passes = _Pass(self._model, self._has_penalty, lengths)
        replay = capture(passes, arguments, allow_unused_input=True)
        torch.cuda.set_rng_state(drawn, arguments[0].device)
        return replay


class _Pass(nn.Module):
    """A pass through a model whose arguments and results are tensors, as captures need them."""

    def __init__(self, model: nn.Module, has_penalty: bool, lengths: dict[str, int]) -> None:
        super().__init__()
        self._model, self._has_penalty, self._lengths = model, has_penalty, lengths

    def forward(self, tokens: Tensor, targets: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        """Return the loss of each target, the memory, and the hidden states twice."""
        out = self._model(tokens, Memory(states.unbind()), targets, **self._lengths)
        hidden = out.hidden, out.raw_hidden
        if not self._has_penalty:
            # Without a penalty they have no gradient.
            hidden = [x.detach() for x in hidden]
        return out.nll, torch.stack(out.mems.states), *hidden


def _replayed(forward: Callable[..., Output]) -> Callable[..., Output]:
    """Return compiled code whose passes the compiler captures as CUDA graphs."""

    def replayed(*arguments: object, **options: object) -> Output:
        torch.compiler.cudagraph_mark_step_begin()
        out = forward(*arguments, **options)
        # The next replay overwrites its results.
        return replace(out, mems=out.mems.clone())

    return replayed


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
    if (precision := Precision(settings.precision, device).name) != "float32":
        rounded = getattr(torch, precision)
        policy = MixedPrecisionPolicy(
            param_dtype=rounded, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    mesh, layers = world.mesh, layers_of(model)
    # Positions are projected for all layers before the first one is called.
    projections = [getattr(x.attention, "r_proj", None) for x in layers]
    if projections := [x for x in projections if x is not None]:
        fully_shard(projections, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for each in (*layers, model):
        fully_shard(each, mesh=mesh, mp_policy=policy)


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
    whole.copy_weights(weights)
    return whole.to(model.device)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model; none of one that has no list of them."""
    return list(getattr(model, "layers", ()))
