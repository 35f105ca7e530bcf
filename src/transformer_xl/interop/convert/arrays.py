"""Arrays of NumPy in old files: plain numbers, whose types and sizes are checked."""

import math
from collections.abc import Callable

import numpy as np

from transformer_xl.interop.convert.inert import Instance, UnreadableFile, printable
from transformer_xl.interop.convert.storages import MAX_DIMS

Spend = Callable[[int], None]
"""Pays for making a copy of so many things; refuses when a file asks for too much."""

COST = 40
"""What a tensor or an array takes of it, each of which needs more bytes in a proper file."""

Make = Callable[[tuple, Spend], object]


def encode(args: tuple, spend: Spend) -> bytes:
    """Make bytes of a text, as which Python 3 writes them for Python 2.

    Raises:
        UnreadableFile: It is no text, or the encoding is a rare one.
    """
    text, encoding = args
    if type(text) is not str or encoding not in ("latin1", "latin-1", "utf-8", "utf8"):
        raise UnreadableFile("a text is encoded in a way that is not supported")
    spend(len(text))
    return text.encode(encoding)


def make_dtype(args: tuple, spend: Spend) -> Instance:
    """Make the type of an array; its state, set later, tells the order of its bytes."""
    return Instance("numpy.dtype", args)


_NUMBERS = {"?", "b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}


def _number_type(dtype: object) -> np.dtype:
    if not isinstance(dtype, Instance) or dtype.kind != "numpy.dtype" or not dtype.args:
        raise UnreadableFile("an array has no type")
    code, state = dtype.args[0], dtype.state
    if not isinstance(code, str) or code.lstrip("<|=") not in _NUMBERS:
        raise UnreadableFile(f"an array holds {printable(code)} instead of numbers")
    if isinstance(state, tuple) and len(state) > 1 and state[1] not in ("<", "|", "="):
        raise UnreadableFile("an array was written by a big-endian machine")
    return np.dtype(code.lstrip("<|="))


def _raw(data: object, spend: Spend) -> bytes:
    # Python 2 had one type for text and bytes.
    if type(data) is str:
        return encode((data, "latin-1"), spend)
    if not isinstance(data, bytes | bytearray):
        raise UnreadableFile("an array has no numbers")
    spend(len(data))
    return bytes(data)


def _shape(shape: object) -> tuple[int, ...]:
    if type(shape) is int:
        shape = (shape,)
    if type(shape) is not tuple or len(shape) > MAX_DIMS:
        raise UnreadableFile(f"an array has no shape of up to {MAX_DIMS} dimensions")
    if any(type(n) is not int or n < 0 for n in shape):
        raise UnreadableFile("an array has a dimension that is no count")
    if math.prod(max(n, 1) for n in shape) >= 2**62:
        raise UnreadableFile("an array has absurd dimensions")
    return shape


def make_reconstruct(args: tuple, spend: Spend) -> np.ndarray:
    """Make an array whose shape, type and numbers are set later."""
    spend(COST)
    return np.empty(0, np.uint8)


def set_array_state(array: np.ndarray, state: object, spend: Spend) -> None:
    """Give an array its shape, its type and its numbers.

    Raises:
        UnreadableFile: They do not belong together.
    """
    if not isinstance(state, tuple) or len(state) not in (4, 5):
        raise UnreadableFile("an array has a state of an unknown kind")
    shape, dtype, is_fortran, data = state[-4:]
    dtype, shape, data = _number_type(dtype), _shape(shape), _raw(data, spend)
    if math.prod(shape) * dtype.itemsize != len(data):
        raise UnreadableFile(f"an array of another size has {len(data):,} bytes")
    # NumPy takes a bool of Python here and says otherwise.
    state = (1, shape, dtype, is_fortran == 1, data)
    array.__setstate__(state)  # pyright: ignore[reportArgumentType]


def make_frombuffer(args: tuple, spend: Spend) -> np.ndarray:
    """Make an array of bytes, a type, a shape and an order."""
    data, dtype, shape, order = args
    array = np.empty(0, np.uint8)
    set_array_state(array, (shape, dtype, order == "F", data), spend)
    return array


def make_scalar(args: tuple, spend: Spend) -> object:
    """Make a number of Python of one of NumPy."""
    dtype, data = args
    array = np.empty(0, np.uint8)
    set_array_state(array, ((1,), dtype, False, data), spend)
    return array[0].item()
