"""Detection of modules that another library has wrapped, replaced or hooked.

Adapters (PEFT), quantization and offloading replace a linear layer or its ``forward``, or register
hooks on it. Such a module must be called. The weights of a plain one are passed directly to the
operations of :mod:`transformer_xl.ops`, which are faster.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules import module as _torch

from transformer_xl.ops import linear


def evaluating(module: nn.Module) -> AbstractContextManager[None]:
    """Put a module and its submodules in evaluation mode inside a ``with`` block.

    Each submodule gets its own previous mode back. Not thread-safe for a module in training mode:
    call ``eval()`` before sharing it between threads.
    """
    in_training = [each for each in _parts(module) if each.training]
    return _not_training(in_training) if in_training else nullcontext()


@contextmanager
def _not_training(modules: Sequence[nn.Module]) -> Iterator[None]:
    for each in modules:
        each.training = False
    try:
        yield
    finally:
        for each in modules:
            each.training = True


def _parts(module: nn.Module) -> list[nn.Module]:
    """Return a module and its submodules: as ``modules()``, but fast enough for each token."""
    parts: list[nn.Module | None] = [module]
    # The list grows while it is iterated over. A module may have None in place of another one.
    for part in parts:
        if part is not None:
            parts += part._modules.values()
    return [part for part in parts if part is not None]


# Global hooks; torch mutates these dictionaries and never replaces them.
_FORWARD, _FORWARD_PRE = _torch._global_forward_hooks, _torch._global_forward_pre_hooks
_BACKWARD, _BACKWARD_PRE = _torch._global_backward_hooks, _torch._global_backward_pre_hooks

# The prefix of this module's own package, which differs in folders written by `save_with_code`.
_BUILT_IN = (__name__[: -len("model.wrapping")], "torch.nn.modules.")

Adapters = tuple[tuple[Any, ...], ...]
"""A fingerprint of the adapters of a model."""


def is_plain(module: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Whether a module is exactly of class ``kind``, without hooks or a replaced ``forward``."""
    return type(module) is kind and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _FORWARD
        or _FORWARD_PRE
        or _BACKWARD
        or _BACKWARD_PRE
        or "forward" in module.__dict__
    )


def projected(proj: nn.Module, x: Float[Tensor, "*batch E"]) -> Float[Tensor, "*batch F"]:
    """Apply a linear layer, or the module that replaced it."""
    return linear(x, proj.weight, proj.bias) if is_plain(proj) else proj(x)  # pyright: ignore[reportArgumentType]


def unwrapped(module: nn.Module, attribute: str) -> Any:
    """Return the module that has an attribute: the module itself or one that it wraps."""
    while not hasattr(module, attribute):
        # PEFT's name of the adapted module.
        module = module.get_submodule("base_layer")
    return module


def adapters(model: nn.Module) -> Adapters:
    """Return a fingerprint of the adapters of a model, to detect that they changed.

    It has, for each adapted module, the active and merged adapters, their scales, and the version
    counters of the weights. Empty without adapters; that costs some microseconds.
    """
    return tuple(_state(module) for module in adapted(model))


def adapted(model: nn.Module) -> list[Any]:
    """Return the modules of a model that have adapters."""
    return [module for module in _parts(model) if _takes_adapters(type(module))]


@cache
def _takes_adapters(kind: type) -> bool:
    return hasattr(kind, "active_adapters")


def _state(module: Any) -> tuple[Any, ...]:
    return (
        id(module),
        tuple(module.active_adapters),
        bool(module.disable_adapters),
        tuple(getattr(module, "merged_adapters", ())),
        tuple(getattr(module, "scaling", {}).items()),
        tuple(parameter._version for parameter in module.parameters()),
    )


def first_wrapped(model: nn.Module) -> str | None:
    """Return which part of a model was wrapped, replaced or hooked, if any."""
    for name, module in model.named_modules():
        kind = type(module)
        if not (kind.__module__.startswith(_BUILT_IN) and is_plain(module, kind)):
            return f"{name or 'the model'} ({kind.__name__})"
    return None
