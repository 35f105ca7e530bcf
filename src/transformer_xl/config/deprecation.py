"""Warnings of what is deprecated, at the line of the user that has to change."""

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

# Packages whose decorators, such as `torch.no_grad`, stand between a function and its caller.
_BETWEEN = {__name__.partition(".")[0], "torch", "jaxtyping", "beartype"}
_SHOWN = 60


def listed(keywords: Mapping[str, Any]) -> str:
    """Return keyword arguments as they are written in a call, with long values cut off."""
    texts = {name: repr(value) for name, value in keywords.items()}
    cut = {name: x if len(x) <= _SHOWN else f"{x[:_SHOWN]}..." for name, x in texts.items()}
    return ", ".join(f"{name}={x}" for name, x in cut.items())


def warn_deprecated(message: str) -> None:
    """Issue a :class:`DeprecationWarning` for the first caller outside this library.

    Python shows such a warning where it belongs to the user's own file, so it must not be
    attributed to a decorator of the function that was called. (``skip_file_prefixes`` of
    :func:`warnings.warn` does this from Python 3.12 on.)
    """
    level, frame = 2, inspect.currentframe()
    while frame := frame and frame.f_back:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _BETWEEN:
            break
        level += 1
    warnings.warn(message, DeprecationWarning, stacklevel=level)
