"""How training calls the model: eagerly, compiled, or replayed as CUDA graphs.

Each of these is a runner. :class:`Network` chooses those of a training once, and has what is around
all of them: DDP and autocast. FSDP changes the model itself (:mod:`transformer_xl.train.sharding`).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from transformer_xl.config import TrainConfig
from transformer_xl.config.device import pick_precision
from transformer_xl.config.distributed import World
from transformer_xl.model import LanguageModel, Memory, Output
from transformer_xl.train.sharding import layers_of

# Without mixed orders of reduction, whose partial sums are added up by 48 slow kernels of a
# 12-layer model, one for each weight and bias of a layer normalization.
CAPTURED: dict[str, Any] = {"triton.cudagraphs": True, "triton.mix_order_reduction": False}
Forward = Callable[..., Any]
"""The ``forward`` of a module."""


class Network:
    """The model as a training step calls it, in one or several processes.

    Every process reads its own streams. With ``ddp`` (Li et al., PyTorch Distributed, 2020), each
    holds the whole model, and gradients are averaged during the backward pass. With ``fsdp`` (Zhao
    et al., PyTorch FSDP, 2023), each holds a shard of every weight, gradient and optimizer state,
    and a layer is gathered when needed; all other parameters are another unit, which is not
    resharded between forward and backward pass.

    Args:
        model: The model, from :func:`shard`.
        settings: Precision, compilation and penalties.
        world: The processes.
    """

    def __init__(self, model: LanguageModel, settings: TrainConfig, world: World) -> None:
        precision = pick_precision(settings.precision, model.device)
        self._device, self._is_rounded = model.device.type, precision != "float32"
        self._dtype = getattr(torch, precision)
        self._module: nn.Module = model
        if world.size > 1 and not isinstance(model, FSDPModule):
            self._module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._runners = choose_runners(model, self._module, settings, world)

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
            The output of the model. Runners of CUDA graphs overwrite all of it but its memory in
            the next call.
        """
        runner = next(x for x in self._runners if x.accepts(mems, mem_len, starts))
        lengths = {"mem_len": mem_len, "context": context}
        rounded = {"enabled": self._is_rounded, "cache_enabled": runner.caches_rounded}
        with runner.prepared(), self._shares_gradients(is_last):
            with torch.autocast(self._device, self._dtype, **rounded):
                out = runner(tokens, mems, targets, starts=starts, **lengths)
            yield out

    def _shares_gradients(self, is_last: bool) -> AbstractContextManager:
        """Return a context for a forward and backward pass; the last of a step syncs gradients."""
        if isinstance(self._module, FSDPModule):
            self._module.set_requires_gradient_sync(is_last)
        elif isinstance(self._module, DistributedDataParallel) and not is_last:
            return self._module.no_sync()
        return nullcontext()


class EagerRunner:
    """Calls the model as it is.

    Args:
        module: The model, or DDP around it.
    """

    caches_rounded = True
    """Whether autocast caches the weights that it rounds."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def accepts(self, mems: Memory | None, mem_len: int, starts: Tensor | None) -> bool:
        """Whether segments can be run whose memory and recordings are like these."""
        return True

    def prepared(self) -> AbstractContextManager:
        """Return a context for the forward and backward pass of a segment."""
        return nullcontext()

    def __call__(
        self, tokens: Tensor, mems: Memory | None, targets: Tensor, **options: Any
    ) -> Output:
        """Return what the model does."""
        return self._module(tokens, mems, targets, **options)


class CompiledRunner(EagerRunner):
    """Calls the model with compiled code in the place of the ``forward`` of some modules.

    The code is in place only in :meth:`prepared`, which includes the backward pass, as that may
    recompute activations. Evaluation calls the modules as they are.

    Args:
        module: The model, or DDP around it.
        compiled: The compiled code by module: of the model, or of its layers.
    """

    def __init__(self, module: nn.Module, compiled: dict[nn.Module, Forward]) -> None:
        super().__init__(module)
        self._compiled = compiled

    def accepts(self, mems: Memory | None, mem_len: int, starts: Tensor | None) -> bool:
        """Accept full memories: each length of one that fills up would be compiled separately."""
        return mems is not None and len(mems) == mem_len

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Put the compiled code in place inside a ``with`` block."""
        for module, forward in self._compiled.items():
            module.forward = forward
        try:
            yield
        finally:
            for module in self._compiled:
                del module.forward


class CapturedRunner(CompiledRunner):
    """Replays the two passes of a step on a GPU, captured as CUDA graphs in their first call.

    Args:
        model: The model.
        compiled: The compiled code of its layers.
        has_penalty: Whether the hidden states have a gradient, that of a penalty.
    """

    # A replay would read the weights that autocast had rounded and cached at the capture.
    caches_rounded = False

    def __init__(
        self, model: nn.Module, compiled: dict[nn.Module, Forward], has_penalty: bool
    ) -> None:
        super().__init__(model, compiled)
        self._has_penalty = has_penalty
        self._key: Any = None
        self._replay: Callable[..., tuple[Tensor, ...]] | None = None

    def accepts(self, mems: Memory | None, mem_len: int, starts: Tensor | None) -> bool:
        """Accept full memories without masks: a graph has only the tensors of its capture."""
        if mems is None or mems.forgotten is not None or starts is not None:
            return False
        return super().accepts(mems, mem_len, starts)

    def __call__(
        self,
        tokens: Tensor,
        mems: Memory | None,
        targets: Tensor,
        *,
        starts: Tensor | None,
        **lengths: int,
    ) -> Output:
        """Return what the model does; the next call overwrites all of it but the memory."""
        assert mems is not None
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

    def _captured(
        self, arguments: tuple[Tensor, ...], lengths: dict[str, int]
    ) -> Callable[..., tuple[Tensor, ...]]:
        passes = _Pass(self._module, self._has_penalty, lengths)
        # Warm-up calls draw masks of dropout; a resumed run makes them at another step.
        drawn = torch.cuda.get_rng_state(arguments[0].device)
        # Graphs are captured on a stream of their own, and replayed on that of the training.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        capture: Any = torch.cuda.make_graphed_callables
        captured = capture(passes, arguments, allow_unused_input=True)
        torch.cuda.set_rng_state(drawn, arguments[0].device)
        return captured


class _Pass(nn.Module):
    """A pass through a model whose arguments and results are tensors, as captures need them."""

    def __init__(self, model: nn.Module, has_penalty: bool, lengths: dict[str, int]) -> None:
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


def choose_runners(
    model: LanguageModel, module: nn.Module, settings: TrainConfig, world: World
) -> list[EagerRunner]:
    """Return the runners of a training, the fastest first; the last one accepts all segments.

    Args:
        model: The model.
        module: The model, or DDP around it.
        settings: Compilation and penalties.
        world: The processes.
    """
    eager = EagerRunner(module)
    if not settings.compile:
        return [eager]
    is_replayed = replays_steps(model, settings, world)
    # With FSDP, gathering and resharding stay outside of the compiled code.
    if settings.compile == "layers" or isinstance(model, FSDPModule):
        # Alike, so that the compiler has the code of the others when it has that of one.
        layers: dict[nn.Module, Forward] = {
            x: torch.compile(x.forward, dynamic=False) for x in layers_of(model)
        }
        runners = [CompiledRunner(module, layers), eager]
        if is_replayed:
            has_penalty = bool(settings.activation_reg or settings.temporal_activation_reg)
            runners.insert(0, CapturedRunner(model, layers, has_penalty))
        return runners
    # With static shapes, a resumed run compiles the same code and gives the same bits. Only full
    # memories are passed to it, so there is one shape.
    options = CAPTURED if is_replayed else None
    forward = torch.compile(model.forward, dynamic=False, options=options)
    compiled: dict[nn.Module, Forward] = {model: _replayed(forward) if is_replayed else forward}
    return [CompiledRunner(module, compiled), eager]


def _replayed(forward: Callable[..., Output]) -> Callable[..., Output]:
    """Return compiled code whose passes the compiler captures as CUDA graphs."""

    def replayed(*arguments: Any, **options: Any) -> Output:
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
