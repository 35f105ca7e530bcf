"""Validation of arguments of the public API: counts, tokens, rows."""

from collections.abc import Iterator, Sequence
from operator import index
from typing import SupportsIndex, TypeVar, overload

import numpy as np
import torch
from jaxtyping import Int, Integer
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.errors import InputError

Text = Sequence[int] | Integer[np.ndarray | Tensor, " length"]
"""A tokenized text, in memory or memory-mapped."""

Rows = Sequence[int] | Tensor
"""Some streams of a batch: their indices, or a boolean mask."""

_Model = TypeVar("_Model")
_SHOWN = 60


@overload
def whole(name: str, value: None, least: int = 0) -> None: ...
@overload
def whole(name: str, value: SupportsIndex, least: int = 0) -> int: ...
def whole(name: str, value: object, least: int = 0) -> int | None:
    """Return a length or count, also a NumPy or torch integer, as an int; None passes.

    Raises:
        InputError: The value is no integer (a float, a bool, a string), or below ``least``.
    """
    if value is None:
        return None
    try:
        number = index(value) if isinstance(value, SupportsIndex) else None
    except TypeError:
        number = None
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    if number is None or is_bool:
        raise InputError(f"{name}={shown(value)} must be an integer")
    if number < least:
        raise InputError(f"{name}={number} must be at least {least}")
    return number


def as_tokens(ids: object, config: ModelConfig, what: str = "ids") -> Int[Tensor, " length"]:
    """Return tokens, in any array, tensor or sequence, as one tensor on the CPU.

    They must be in the vocabulary of the model; errors call them ``what``.

    Raises:
        InputError: The value is no one-dimensional sequence of integers, or a token is outside the
            vocabulary.
    """
    require_token_inputs(config)
    # Bytes are the tokens of a vocabulary of bytes, which may have some symbols more.
    is_bytes = isinstance(ids, bytes | bytearray) and 256 <= config.vocab_size < 320
    is_text = not is_bytes and isinstance(ids, str | bytes | bytearray | memoryview)
    if isinstance(ids, Iterator) or (is_bytes and isinstance(ids, bytes | bytearray)):
        ids = [*ids]
    try:
        # NumPy, as torch cannot compare unsigned integers.
        array = np.asarray(ids.detach().cpu() if isinstance(ids, Tensor) else ids)
    except (ValueError, TypeError):
        # Nested sequences, or tensors in a precision that NumPy does not have.
        array = np.asarray(None)
    if is_text or array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        described = shown(ids)
        if isinstance(ids, Tensor | np.ndarray):
            described = f"an array of shape {tuple(ids.shape)} and {ids.dtype}"
        elif is_text:
            described = f"the text {described}, of which vocab.encode makes them"
        raise InputError(f"{what} must be integers in a row, not {described}")
    require_known(array, config.vocab_size, "" if what == "ids" else f" of {what}")
    # Copied, as a memory-mapped array is read-only.
    return torch.from_numpy(array.astype(np.int64))


def require_known(tokens: np.ndarray, vocab_size: int, what: str, ignored: int = 0) -> None:
    """Require tokens of a vocabulary, or a number in their place that is ``ignored``.

    Raises:
        InputError: A token is outside of it; the error calls it ``what``, and says where it is.
    """
    wrong = np.argwhere(((tokens < 0) | (tokens >= vocab_size)) & (tokens != ignored))
    if len(wrong):
        *row, position = wrong[0].tolist()
        place = f"row {row[0]}, position {position}" if row else f"position {position}"
        raise InputError(
            f"token {tokens[*row, position]}{what} is outside the vocabulary of {vocab_size} (the "
            f"model knows 0 to {vocab_size - 1}): it was made with another one; it is at {place}"
            f"{f'; {ignored} would be ignored' if ignored < 0 else ''}"
        )


def explain_unknown(tokens: Tensor, vocab_size: int, what: str = "", ignored: int = 0) -> None:
    """After an error of torch, require the tokens that were looked up to be of the vocabulary.

    They are not looked at before, which would cost time in each step of a training. On a GPU, an
    assertion of the device has failed, after which nothing can be read from it.

    Raises:
        InputError: As :func:`require_known`.
    """
    if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
        require_known(tokens.detach().numpy(), vocab_size, what, ignored)


def require_token_inputs(config: ModelConfig) -> None:
    """Require a model that reads tokens.

    Raises:
        InputError: It reads real vectors.
    """
    if config.n_features:
        raise InputError(
            f"the model reads real vectors (n_features={config.n_features}) and no tokens or text: "
            "txl train, txl eval and transformer_xl.tasks.series.forecast read arrays (data.vocab "
            "features)"
        )


def require_model(model: _Model) -> _Model:
    """Require a model of this library, and return it.

    Raises:
        InputError: The value is something else, such as a path or a model of another library.
    """
    if not isinstance(getattr(model, "config", None), ModelConfig):
        raise InputError(
            f"model={shown(model)} is no TransformerXL: TransformerXL.from_pretrained(folder) "
            "reads one; that of transformer_xl.interop.hf has one as its attribute transformer"
        )
    return model


def require_tensor(name: str, value: object, *, kind: str = "") -> Tensor:
    """Require a tensor, and return it, integers of any width as int64.

    Args:
        name: What errors call it.
        value: The value.
        kind: ``integers`` or ``real numbers``, of which it must be. Empty: it may hold anything.

    Raises:
        InputError: The value is something else, such as a list, or has another dtype.
    """
    if not isinstance(value, Tensor):
        written = type(value).__name__
        raise InputError(
            f"{name} must be a tensor, not a {written}: torch.tensor({name}) makes one"
        )
    # No integer type: bool.
    is_integer = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    if kind and not (is_integer if kind == "integers" else value.is_floating_point()):
        raise InputError(f"{name} of {value.dtype} must be {kind}")
    return value.long() if kind == "integers" else value


def stream_numbers(rows: Rows, n: int, device: torch.device) -> Tensor:
    """Return the indices of some of ``n`` streams, given indices or a mask.

    Raises:
        InputError: An index is out of range. Not checked on a GPU, which would synchronize; there,
            indexing fails with a device-side assertion.
    """
    numbers = torch.as_tensor(rows)
    # torch makes a float tensor of an empty list.
    if numbers.ndim != 1 or (numbers.is_floating_point() and len(numbers)):
        raise InputError(f"rows={shown(rows)} must be the numbers of streams, or a mask of them")
    if numbers.dtype == torch.bool:
        if len(numbers) != n:
            raise InputError(f"a mask of {len(numbers)} streams for a memory of {n}")
        numbers = numbers.nonzero()[:, 0]
    is_at_hand = numbers.device.type == "cpu" and len(numbers)
    if is_at_hand and not 0 <= numbers.min() <= numbers.max() < n:
        raise InputError(f"rows={shown(rows)}: the memory has the streams 0 to {n - 1}")
    return numbers.to(device, torch.int64)


def shown(value: object) -> str:
    """Return the repr of a value for an error message, truncated if long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
