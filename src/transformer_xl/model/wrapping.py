"""Modules that others have wrapped, replaced or hooked, and those that are as they were built.

Adapters (PEFT), quantization and offloading put a module of their own where a linear map stood, or
replace its ``forward``, or hang hooks on it. Such a module is called. A plain one is not: its
weights are handed to the operations of :mod:`transformer_xl.ops`, which are faster.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules import module as _torch

from transformer_xl.ops import linear


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module and all in it into evaluation mode for the length of a ``with`` block.

    Each is put back into the mode that it had, be it another than that of the whole. Threads that
    share a module in training mode put it back for each other: call its ``eval()`` first.
    """
    in_training = [each for each in module.modules() if each.training]
    for each in in_training:
        each.training = False
    try:
        yield
    finally:
        for each in in_training:
            each.training = True


# Hooks on all modules there are: torch never puts others in the place of these dictionaries.
_FORWARD, _FORWARD_PRE = _torch._global_forward_hooks, _torch._global_forward_pre_hooks
_BACKWARD, _BACKWARD_PRE = _torch._global_backward_hooks, _torch._global_backward_pre_hooks

_LEAVES = frozenset({nn.Linear, nn.LayerNorm, type(None)})
"""Most modules are of these kinds; they have neither adapters nor modules inside."""

_BUILT_IN = ("transformer_xl.", "torch.nn.modules.")

Adapters = tuple[tuple[Any, ...], ...]
"""What the adapters of a model were at some time."""


def is_plain(module: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Whether calling a module does what the class ``kind`` does, and nothing besides."""
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
    """Apply a linear map, or what stands in its place."""
    return linear(x, proj.weight, proj.bias) if is_plain(proj) else proj(x)  # pyright: ignore[reportArgumentType]


def unwrapped(module: nn.Module, attribute: str) -> Any:
    """Return the module that has an attribute of ours: the module itself or one that it wraps."""
    while not hasattr(module, attribute):
        # What adapters call what they adapt.
        module = module.get_submodule("base_layer")
    return module


def adapters(model: nn.Module) -> Adapters:
    """Return what says whether the adapters of a model are as they were.

    Of each module with adapters: which are active and merged, at what scales, and how often their
    weights were written. Empty for a model without any, which takes some microseconds to see.
    """
    found: list[Any] = []
    queue: list[Any] = [model]
    # A list may grow while it is gone through.
    for module in queue:
        if (kind := type(module)) in _LEAVES:
            continue
        if hasattr(kind, "active_adapters"):
            found.append(module)
        queue += module._modules.values()
    return tuple(_state(module) for module in found)


def _state(module: Any) -> tuple[Any, ...]:
    return (
        id(module),
        tuple(module.active_adapters),
        bool(module.disable_adapters),
        tuple(getattr(module, "merged_adapters", ())),
        tuple(getattr(module, "scaling", {}).items()),
        tuple(parameter._version for parameter in module.parameters()),
    )


def is_all_plain(model: nn.Module) -> bool:
    """Whether no part of a model was wrapped, replaced or hooked."""
    return _first_wrapped(model) is None


def require_plain(model: nn.Module, consequence: str) -> None:
    """Refuse a model of which a part was wrapped, replaced or hooked.

    Raises:
        ValueError: It is so; the message names the part.
    """
    if (found := _first_wrapped(model)) is not None:
        raise ValueError(
            f"{found} was wrapped, replaced or hooked: {consequence}. Merge adapters "
            "(model.merge_and_unload()) and remove hooks first"
        )


def _first_wrapped(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        kind = type(module)
        if not (kind.__module__.startswith(_BUILT_IN) and is_plain(module, kind)):
            return f"{name or 'the model'} ({kind.__name__})"
    return None
