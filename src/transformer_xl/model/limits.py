"""Lower bounds of memory use, and errors for settings that exceed the machine."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from transformer_xl.config import ModelConfig, total_memory
from transformer_xl.errors import SettingsError

_FLOAT = 4
"""Bytes of a float32."""
_TENSOR_BYTES = 6_000
"""What a tensor takes, however small, measured: its module is built twice, once without numbers."""
_ANY_SIZE = "TXL_ANY_SIZE"
"""The environment variable that lifts the limit on loading, which child processes inherit."""
_LIFTING = threading.Lock()
_BEFORE: list[str | None] = []
"""The values of the variable before each block of :func:`any_size` that was not left yet."""


class MemoryLimitError(SettingsError):
    """Something would take more memory than there is."""


def least_weights(config: ModelConfig) -> int:
    """Count the parameters, from those of models of two and three layers on the meta device."""
    from transformer_xl.model import builder

    changes: dict[str, object] = {"kind": config.family}
    if config.layer_attn_lens:
        changes["layer_attn_lens"] = ()
    if not (config.vocab_size or config.n_mixtures):
        # Of a recipe whose vocabulary is not known yet, the least that it can be.
        ends = *config.cutoffs, config.reset_at or 0, config.completion_at or 0
        changes["vocab_size"] = 1 + max(ends)
    try:
        with torch.device("meta"):
            two, three = (
                sum(x.numel() for x in builder(config.family)(smaller).parameters())
                for smaller in (replace(config, n_layer=n, **changes) for n in (2, 3))
            )
    except RuntimeError as error:
        # torch counts bytes in 64 bits.
        sizes = (
            f"d_model={config.d_model}, d_inner={config.d_inner}, vocab_size={config.vocab_size}"
        )
        raise MemoryLimitError(
            f"{sizes}: a matrix would take more than any machine has: make a smaller model"
        ) from error
    return two + (config.n_layer - 2) * (three - two)


def require_bytes(
    what: str, n_bytes: int, device: torch.device, settings: Mapping[str, object], remedy: str
) -> None:
    """Require that the total memory of a device is at least ``n_bytes``.

    Args:
        what: What would be allocated, for the error.
        n_bytes: A lower bound of its bytes.
        device: The device. If its memory is unknown, the check passes.
        settings: The settings that determine the size, for the error.
        remedy: What to do about it, for the error.

    Raises:
        MemoryLimitError: The device has less memory.
    """
    available = total_memory(device)
    if available is not None and n_bytes > available:
        assignments = ", ".join(f"{name}={value}" for name, value in settings.items())
        where = "this machine" if device.type == "cpu" else f"the {device.type} device"
        raise MemoryLimitError(
            f"{assignments}: {what} would take at least {readable(n_bytes)}, and {where} has "
            f"{readable(available)}: {remedy}"
        )


@contextmanager
def any_size() -> Iterator[None]:
    """Load models inside a ``with`` block however much memory that takes.

    It holds for all threads of this process, and for processes that are started inside.
    """
    with _LIFTING:
        _BEFORE.append(os.environ.get(_ANY_SIZE))
        os.environ[_ANY_SIZE] = "1"
    try:
        yield
    finally:
        with _LIFTING:
            # The last block to be left, of whichever thread, restores the value of the first one.
            first = _BEFORE[0]
            _BEFORE.pop()
            if not _BEFORE:
                del os.environ[_ANY_SIZE]
                if first is not None:
                    os.environ[_ANY_SIZE] = first


def require_loading(
    config: ModelConfig, n_tensors: int, weights: Path, *, number_bytes: int = _FLOAT
) -> None:
    """Require that a stored model fits in the memory of this machine, before it is built.

    Files take no memory of their own: they are mapped. :func:`any_size` lifts the limit.

    Args:
        config: The settings of the model.
        n_tensors: How many tensors the headers of the files name.
        weights: The file with the weights, or the index.
        number_bytes: Bytes of a parameter once it is loaded, at least.

    Raises:
        OverflowError: There are more layers than tensors.
        MemoryLimitError: It takes more.
    """
    if config.n_layer > n_tensors:
        raise OverflowError(f"n_layer={config.n_layer}")
    if os.environ.get(_ANY_SIZE):
        return
    needed = number_bytes * least_weights(config) + n_tensors * _TENSOR_BYTES
    settings: dict[str, object] = {"n_layer": config.n_layer, "n_tensors": n_tensors}
    lifted = (
        "--any_size loads it all the same (in Python: with transformer_xl.model.any_size(); "
        f"in other programs: {_ANY_SIZE}=1 in the environment)"
    )
    require_bytes(f"to load {weights}", needed, torch.device("cpu"), settings, lifted)


def readable(n_bytes: int) -> str:
    """Format a number of bytes with a unit."""
    units = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
    power = min((len(str(n_bytes)) - 1) // 3, len(units) - 1)
    return f"{n_bytes / 1000**power:,.3g} {units[power]}"
