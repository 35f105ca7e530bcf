"""What calls of the library refuse before anything is computed: wrong counts, wrong tokens."""

from collections.abc import Iterator, Sequence, Set
from operator import index
from typing import Any, SupportsIndex, TypeVar, overload

import numpy as np
import torch
from jaxtyping import Int, Integer
from torch import Tensor

from transformer_xl.config import ModelConfig

Text = Sequence[int] | Integer[np.ndarray | Tensor, " length"]
"""A text in tokens, as it lies in memory or on the disk."""

Rows = Sequence[int] | Tensor
"""Some of the streams of a memory: their numbers, or a mask of all."""

_Model = TypeVar("_Model")
_SHOWN = 60


@overload
def whole(name: str, value: None, least: int = 0) -> None: ...
@overload
def whole(name: str, value: SupportsIndex, least: int = 0) -> int: ...
def whole(name: str, value: Any, least: int = 0) -> int | None:
    """Return a length or a count as an int, integers of numpy and torch too; None passes.

    Raises:
        ValueError: It is no integer, such as a float, a bool or a text, or below ``least``.
    """
    if value is None:
        return None
    try:
        number = None if _is_bool(value) else index(value)
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name}={shown(value)} must be an integer")
    if number < least:
        raise ValueError(f"{name}={number} must be at least {least}")
    return number


def require_at_least(least: int, **values: Any) -> None:
    """Check lengths and counts by name; None passes.

    Raises:
        ValueError: One is no integer, or too small.
    """
    for name, value in values.items():
        whole(name, value, least)


def as_tokens(ids: Any, config: ModelConfig, what: str = "ids") -> Int[Tensor, " length"]:
    """Return tokens, in any array, tensor or sequence, as one tensor on the processor.

    Args:
        ids: The tokens, as :data:`Text` has them; anything else is refused.
        config: The settings of the model that they are for.
        what: What they are called in errors.

    Raises:
        ValueError: They are no integers in a row, or one is outside the vocabulary.
    """
    given = ids.detach().cpu() if isinstance(ids, Tensor) and is_integer(ids) else None
    # Numpy compares what torch cannot: unsigned integers.
    array = _array(ids) if given is None else given.numpy()
    is_whole = array.dtype.kind in "iu" or array.shape == (0,)
    if not is_whole or array.ndim != 1:
        raise ValueError(f"{what} must be integers in a row, not {_described(ids)}")
    V = config.vocab_size
    if array.size and not 0 <= (least := array.min()) <= (most := array.max()) < V:
        raise ValueError(
            f"token {least if least < 0 else most}{'' if what == 'ids' else f' of {what}'} is "
            f"outside the vocabulary of {V} (the model knows 0 to {V - 1}): it was made with "
            "another one"
        )
    # What lies on the disk is copied: it cannot be written to.
    return given.long() if given is not None else torch.from_numpy(array.astype(np.int64))


def require_model(model: _Model) -> _Model:
    """Return what is a model of this library.

    Raises:
        ValueError: It is something else, such as a folder or the model of another library.
    """
    if not isinstance(getattr(model, "config", None), ModelConfig):
        raise ValueError(
            f"model={shown(model)} is no TransformerXL: TransformerXL.from_pretrained(folder) "
            "reads one; that of transformer_xl.interop.hf has one as its attribute transformer"
        )
    return model


def require_tensor(name: str, value: Any) -> Tensor:
    """Return what must be a tensor.

    Raises:
        ValueError: It is something else, such as a list.
    """
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        raise ValueError(f"{name} must be a tensor, not a {kind}: torch.tensor({name}) makes one")
    return value


def whole_tensor(name: str, value: Any) -> Tensor:
    """Return a tensor of integers of any width as one of 64 bits, itself where it is one.

    Raises:
        ValueError: It is no tensor, or not one of integers.
    """
    if not is_integer(require_tensor(name, value)):
        raise ValueError(f"{name} of {value.dtype} must be integers")
    return value.long()


def is_integer(x: Tensor) -> bool:
    """Whether a tensor holds integers of any width; truth values are none."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def require_state(tensors: dict[str, Tensor], ndim: int, forgotten: Tensor | None) -> None:
    """Check what a memory is rebuilt from.

    Args:
        tensors: Its tensors, for all layers, by name.
        ndim: Their dimensions; the last three are streams, positions and width.
        forgotten: How many positions each stream does not see.

    Raises:
        ValueError: They do not fit each other.
    """
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    first = next(iter(tensors.values()))
    is_one = all(x.shape == first.shape and x.is_floating_point() for x in tensors.values())
    if not (is_one and first.ndim == ndim and len(first)):
        raise ValueError(f"{shapes} are no memory: numbers of {ndim} dimensions, all of one shape")
    B, M = first.shape[-3], first.shape[-2]
    if forgotten is not None and not (
        forgotten.shape == (B,)
        and is_integer(forgotten)
        and bool(((forgotten >= 0) & (forgotten <= M)).all())
    ):
        raise ValueError(
            f"forgotten={shown(forgotten)} must be an integer for each of the {B} streams, from 0 "
            f"to {M}"
        )


def stream_numbers(rows: Any, n: int, device: torch.device) -> Tensor:
    """Return which of ``n`` streams are meant; a mask names those where it is true.

    Raises:
        ValueError: There is no such stream; on a GPU, which would have to be waited for, the
            device says so.
    """
    numbers = torch.as_tensor(rows)
    is_mask = numbers.dtype == torch.bool
    # No rows at all are an empty list of real numbers.
    if numbers.ndim != 1 or not (is_mask or is_integer(numbers) or not len(numbers)):
        raise ValueError(f"rows={shown(rows)} must be the numbers of streams, or a mask of them")
    if is_mask and len(numbers) != n:
        raise ValueError(f"a mask of {len(numbers)} streams for a memory of {n}")
    numbers = numbers.nonzero()[:, 0] if is_mask else numbers.long()
    is_at_hand = numbers.device.type == "cpu" and len(numbers)
    if is_at_hand and not 0 <= numbers.min() <= numbers.max() < n:
        raise ValueError(f"rows={shown(rows)}: the memory has the streams 0 to {n - 1}")
    return numbers.to(device)


def shown(value: object) -> str:
    """Return a value as an error shows it, cut if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_) or getattr(value, "dtype", None) == torch.bool


def _array(ids: Any) -> np.ndarray:
    nothing = np.empty((), dtype=object)
    # Letters and keys are no tokens; numpy takes a set for one thing.
    if isinstance(ids, str | dict | Set):
        return nothing
    if isinstance(ids, bytes | bytearray):
        return np.frombuffer(ids, np.uint8)
    ids = list(ids) if isinstance(ids, Iterator) else ids
    try:
        if isinstance(ids, list | tuple) and set(map(type, ids)) - {int}:
            # Numpy counts with truth values, and takes 1.0 for a number like 1.
            return nothing if any(map(_is_bool, ids)) else np.array([*map(index, ids)])
        return np.asarray(ids)
    # Rows instead of integers, or what is longer than 64 bits.
    except (ValueError, TypeError, RuntimeError, OverflowError):
        return nothing


def _described(ids: Any) -> str:
    if isinstance(ids, Tensor | np.ndarray):
        return f"an array of shape {tuple(ids.shape)} and {ids.dtype}"
    if isinstance(ids, str):
        return f"the text {shown(ids)}, of which vocab.encode makes them"
    return shown(ids)
