"""Modules are called, so that hooks, adapters, quantization and offloading are honoured.

Where a result is computed from weights alone, by a compiled step for example, it has to be known
whether a call would give another one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

_BUILT_IN = ("transformer_xl.", "torch.nn.modules.")

Adapters = tuple[tuple[object, ...], ...]
"""A fingerprint of the adapters of a model."""


@contextmanager
def evaluating(modules: nn.Module | Sequence[nn.Module]) -> Iterator[None]:
    """Put a module and its submodules in evaluation mode inside a ``with`` block.

    Each submodule gets its own previous mode back. Not thread-safe for a module in training mode:
    call ``eval()`` before sharing it between threads.

    Args:
        modules: The module; or the list of all of them, where it is used often.
    """
    modules = [*modules.modules()] if isinstance(modules, nn.Module) else modules
    in_training = [module for module in modules if module.training]
    for module in in_training:
        module.training = False
    try:
        yield
    finally:
        for module in in_training:
            module.training = True


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of a module is the forward pass of its class ``kind`` and nothing else.

    Hooks cannot be known in a traced program: call the module there.
    """
    is_hooked = not torch.compiler.is_compiling() and (
        module._forward_hooks or module._forward_pre_hooks or _has_any_global_hook()
    )
    return type(module) is kind and "forward" not in vars(module) and not is_hooked


def first_wrapped(model: nn.Module) -> str | None:
    """Return which part of a model was wrapped, replaced or hooked, if any."""
    for name, module in model.named_modules():
        kind = type(module)
        is_built_in = kind.__module__.startswith(_BUILT_IN) or name.split(".")[0] == "positions"
        if not (is_built_in and is_plain(module, kind)):
            return f"{name or 'the model'} ({kind.__name__})"
    return None


def unwrapped(module: nn.Module, attribute: str) -> Any:
    """Return the module that has an attribute: the module itself or one that it wraps."""
    while not hasattr(module, attribute):
        # PEFT's name of the adapted module.
        module = module.get_submodule("base_layer")
    return module


def adapters(model: nn.Module) -> Adapters:
    """Return a fingerprint of the adapters of a model, to detect that they changed.

    It has, for each adapted module, the active and merged adapters, their scales, and the version
    counters of the weights. Empty without adapters.
    """
    return tuple(_state(module) for module in model.modules() if _takes_adapters(type(module)))


@cache
def _takes_adapters(kind: type) -> bool:
    return hasattr(kind, "active_adapters")


def _state(module: Any) -> tuple[object, ...]:
    return (
        id(module),
        tuple(module.active_adapters),
        bool(module.disable_adapters),
        tuple(getattr(module, "merged_adapters", ())),
        tuple(getattr(module, "scaling", {}).items()),
        tuple(parameter._version for parameter in module.parameters()),
    )
