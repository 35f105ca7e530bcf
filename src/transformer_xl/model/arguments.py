"""Validation of arguments of the public API: counts, tokens, rows."""

from collections.abc import Sequence, Set
from operator import index
from typing import Any, SupportsIndex, TypeVar, overload

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
_BYTES = 256
_ADDED = 64
"""Symbols that a vocabulary of bytes may have besides them."""


@overload
def whole(name: str, value: None, least: int = 0) -> None: ...
@overload
def whole(name: str, value: SupportsIndex, least: int = 0) -> int: ...
def whole(name: str, value: Any, least: int = 0) -> int | None:
    """Return a length or count, also a NumPy or torch integer, as an int; None passes.

    Raises:
        InputError: The value is no integer (a float, a bool, a string), or below ``least``.
    """
    if value is None:
        return None
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or _is_bool(value):
        raise InputError(f"{name}={shown(value)} must be an integer")
    if number < least:
        raise InputError(f"{name}={number} must be at least {least}")
    return number


def require_at_least(least: int, **values: Any) -> None:
    """Require integers of at least ``least``, given by name; None passes.

    Raises:
        InputError: One is no integer, or too small.
    """
    for name, value in values.items():
        whole(name, value, least)


def as_tokens(ids: Any, config: ModelConfig, what: str = "ids") -> Int[Tensor, " length"]:
    """Return tokens, in any array, tensor or sequence, as one tensor on the CPU.

    They must be in the vocabulary of the model; errors call them ``what``.

    Raises:
        InputError: The value is no one-dimensional sequence of integers, or a token is outside the
            vocabulary.
    """
    require_token_inputs(config)
    if isinstance(ids, bytes | bytearray) and not _BYTES <= config.vocab_size < _BYTES + _ADDED:
        raise InputError(
            f"{what} must be integers in a row: the bytes {shown(ids)} are tokens of a vocabulary "
            f"of {_BYTES} bytes alone, and this model has one of {config.vocab_size}, of which "
            "vocab.encode makes them of a text"
        )
    array = _integers(ids)
    if array is None or array.ndim != 1:
        described = shown(ids)
        if isinstance(ids, Tensor | np.ndarray):
            described = f"an array of shape {tuple(ids.shape)} and {ids.dtype}"
        elif isinstance(ids, str):
            described = f"the text {described}, of which vocab.encode makes them"
        raise InputError(f"{what} must be integers in a row, not {described}")
    require_known(array, config.vocab_size, "" if what == "ids" else f" of {what}")
    # Copied, as a memory-mapped array is read-only.
    return (
        ids.detach().cpu().long() if isinstance(ids, Tensor) else torch.tensor(array.astype("i8"))
    )


def _integers(ids: Any) -> np.ndarray | None:
    """Return integers as an array; None: they are something else."""
    if isinstance(ids, Tensor):
        # NumPy, as torch cannot compare unsigned integers.
        return ids.detach().cpu().numpy() if is_integer(ids) else None
    if isinstance(ids, bytes | bytearray):
        return np.frombuffer(ids, np.uint8)
    if isinstance(ids, np.ndarray):
        return ids if ids.dtype.kind in "iu" or ids.shape == (0,) else None
    # Characters and keys are no tokens.
    if isinstance(ids, str | dict | Set):
        return None
    try:
        numbers = [*ids]
        # NumPy would accept bools, and 1.0 as 1.
        if set(map(type, numbers)) - {int} and any(map(_is_bool, numbers)):
            return None
        return np.array([*map(index, numbers)], np.int64)
    # Nested sequences, or integers of more than 64 bits.
    except (ValueError, TypeError, RuntimeError, OverflowError):
        return None


def require_known(tokens: np.ndarray, vocab_size: int, what: str = "", ignored: int = 0) -> None:
    """Require tokens of a vocabulary, or a number in their place that is ``ignored``.

    Raises:
        InputError: A token is outside of it; the error calls it ``what``, and says where it is.
    """
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        wrong = np.argwhere(((tokens < 0) | (tokens >= vocab_size)) & (tokens != ignored))
        if not len(wrong):
            return
        *row, position = wrong[0].tolist()
        place = f"row {row[0]}, position {position}" if row else f"position {position}"
        raise InputError(
            f"token {tokens[*row, position]}{what} is outside the vocabulary of {vocab_size} (the "
            f"model knows 0 to {vocab_size - 1}): it was made with another one; it is at {place}"
            f"{f'; {ignored} would be ignored' if ignored < 0 else ''}"
        )


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


def require_symbols(config: ModelConfig) -> None:
    """Require a model that predicts symbols.

    Raises:
        InputError: It predicts real numbers.
    """
    if config.n_mixtures:
        raise InputError(
            f"n_mixtures={config.n_mixtures}: the model predicts real numbers, and has no "
            "probabilities of tokens; transformer_xl.tasks.series.forecast draws what follows"
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


def require_tensor(name: str, value: Any) -> Tensor:
    """Require a tensor, and return it.

    Raises:
        InputError: The value is something else, such as a list.
    """
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        raise InputError(f"{name} must be a tensor, not a {kind}: torch.tensor({name}) makes one")
    return value


def require_whole(name: str, value: Any) -> Tensor:
    """Return an integer tensor of any width as int64, without a copy if it already is.

    Raises:
        InputError: The value is no tensor, or its dtype is no integer type.
    """
    if not is_integer(require_tensor(name, value)):
        raise InputError(f"{name} of {value.dtype} must be integers")
    return value.long()


def is_integer(x: Tensor) -> bool:
    """Whether a tensor has an integer dtype; bool does not count."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def require_state(tensors: dict[str, Tensor], ndim: int, forgotten: Tensor | None) -> None:
    """Validate the state dict of a memory, of tensors that end in streams, positions and width.

    Raises:
        InputError: A shape, dtype or count is wrong.
    """
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    shape = next(iter(shapes.values()))
    is_one = set(shapes.values()) == {shape} and len(shape) == ndim and shape[0]
    if not (is_one and all(x.is_floating_point() for x in tensors.values())):
        raise InputError(f"{shapes} are no memory: numbers of {ndim} dimensions, all of one shape")
    B, M = shape[-3:-1]
    if forgotten is not None and not (
        forgotten.shape == (B,)
        and is_integer(forgotten)
        and bool(((forgotten >= 0) & (forgotten <= M)).all())
    ):
        raise InputError(
            f"forgotten={shown(forgotten)} must be an integer for each of the {B} streams, from 0 "
            f"to {M}"
        )


def stream_numbers(rows: Any, n: int, device: torch.device) -> Tensor:
    """Return the indices of some of ``n`` streams, given indices or a mask.

    Raises:
        InputError: An index is out of range. Not checked on a GPU, which would synchronize; there,
            indexing fails with a device-side assertion.
    """
    numbers = torch.as_tensor(rows)
    is_mask = numbers.dtype == torch.bool
    # torch makes a float tensor of an empty list.
    if numbers.ndim != 1 or not (is_mask or is_integer(numbers) or not len(numbers)):
        raise InputError(f"rows={shown(rows)} must be the numbers of streams, or a mask of them")
    if is_mask and len(numbers) != n:
        raise InputError(f"a mask of {len(numbers)} streams for a memory of {n}")
    numbers = numbers.nonzero()[:, 0] if is_mask else numbers.long()
    is_at_hand = numbers.device.type == "cpu" and len(numbers)
    if is_at_hand and not 0 <= numbers.min() <= numbers.max() < n:
        raise InputError(f"rows={shown(rows)}: the memory has the streams 0 to {n - 1}")
    return numbers.to(device)


def step_inputs(inputs: Tensor, batch_size: int, config: ModelConfig) -> Tensor:
    """Return the inputs of a step: a token of each stream, or a vector of ``n_features``.

    Raises:
        InputError: The shape is another one.
    """
    F, shape = config.n_features, tuple(inputs.shape)
    if shape != ((batch_size, F) if F else (batch_size,)):
        what = f"a vector of n_features={F}" if F else "one"
        raise InputError(
            f"tokens of shape {shape} must be {what} for each of the {batch_size} streams"
        )
    return inputs


def shown(value: object) -> str:
    """Return the repr of a value for an error message, truncated if long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_) or getattr(value, "dtype", None) == torch.bool


def explain_unknown(tokens: Tensor, vocab_size: int, what: str = "", ignored: int = 0) -> None:
    """After an error of torch, require the tokens that were looked up to be of the vocabulary.

    They are not looked at before, which would cost time in each step of a training. On a GPU, an
    assertion of the device has failed, after which nothing can be read from it.

    Raises:
        InputError: As :func:`require_known`.
    """
    if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
        require_known(tokens.detach().numpy(), vocab_size, what, ignored)


def require_segment(tokens: Any, vectors: Any, starts: Any, config: ModelConfig) -> None:
    """Require either tokens or vectors of right types and shapes, and fitting starts."""
    if (tokens is None) == (vectors is None):
        number = "both" if vectors is not None else "neither"
        raise InputError(f"a segment is tokens or inputs_embeds: {number} of them is given")
    inputs = vectors if tokens is None else tokens
    if tokens is None:
        _require_real("inputs_embeds", vectors, config.d_model, "d_model")
    elif config.n_features:
        _require_real("inputs", tokens, config.n_features, "n_features")
    elif require_whole("tokens", tokens).ndim != 2 or not all(tokens.shape):
        raise InputError(
            f"tokens of shape {tuple(tokens.shape)} must be (streams, length) and not empty"
        )
    shape = inputs.shape[:2]
    if starts is not None and (
        require_tensor("starts", starts).shape != shape or starts.dtype != torch.bool
    ):
        raise InputError(
            f"starts of shape {tuple(starts.shape)} and {starts.dtype} must say true or false for "
            f"each place of a segment of shape {tuple(shape)}"
        )


def _require_real(name: str, x: Any, width: int, setting: str) -> None:
    """Require real vectors of a width."""
    shape = tuple(require_tensor(name, x).shape)
    if not (x.is_floating_point() and x.ndim == 3 and all(shape) and shape[2] == width):
        raise InputError(
            f"{name} of shape {shape} and {x.dtype} must be real vectors, (streams, length, "
            f"{setting}={width}), and not empty"
        )


def require_targets(
    targets: Any,
    shape: tuple[int, int],
    ext_len: int,
    context: int | None,
    *,
    are_real: bool = False,
) -> Tensor:
    """Require targets for a segment, and return them as int64 or, if ``are_real``, as they are.

    The other arguments are those of :meth:`LanguageModel.forward`.
    """
    if not are_real:
        targets = require_whole("targets", targets)
    elif not require_tensor("targets", targets).is_floating_point():
        raise InputError(
            f"targets of {targets.dtype} must be real numbers: the model ends in a mixture of "
            "n_mixtures normal distributions"
        )
    least, most = (0, ext_len) if context is None else (context, context)
    missing = shape[1] - targets.shape[-1] if targets.ndim == 2 else -1
    is_pair = targets.ndim == 2 and len(targets) == shape[0]
    if not (is_pair and least <= missing <= most and targets.shape[1]):
        raise InputError(
            f"targets of shape {tuple(targets.shape)} must have the shape of the tokens, "
            f"{shape}" + f", but for the first {most}" * (most > 0)
        )
    return targets
