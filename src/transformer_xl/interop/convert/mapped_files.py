"""Files that may be damaged or hostile: their errors, and tensors on memory-mapped files."""

import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from transformer_xl.config import open_regular, read_small_file
from transformer_xl.errors import CheckpointError

_MAX_JSON_BYTES = 4 << 20
_MAX_DIMS = 8


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the errors of reading a damaged file into :class:`CheckpointError`."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        kind = type(error).__name__
        reason = f"{kind}: {error}" if isinstance(error, SafetensorError) else kind
        text = f"damaged or of another kind ({reason}): get a fresh copy of it"
        text = str(error) if isinstance(error, CheckpointError) else text
        raise CheckpointError(text if str(path) in text else f"{path}: {text}") from error


def map_file(path: Path) -> mmap.mmap:
    """Memory-map a file copy-on-write, as tensors need writable memory."""
    with open_regular(path) as file:
        if not os.fstat(file.fileno()).st_size:
            raise CheckpointError(f"{path} is empty: get a fresh copy of it")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def read_json(path: Path) -> dict[str, object]:
    """Read an object from an untrusted JSON file."""
    try:
        content = read_small_file(path, _MAX_JSON_BYTES)
        return msgspec.json.decode(content, type=dict[str, object])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no object in JSON, or damaged ({error}): restore it from a copy"
        ) from error


def on_file(data: mmap.mmap, start: int, n_bytes: int, dtype: torch.dtype) -> Tensor:
    """Return bytes of a mapped file as a tensor: a view, or a copy if they are not aligned."""
    if not n_bytes:
        return torch.empty(0, dtype=torch.uint8)
    # Raises an error beyond the end of the file.
    numbers = torch.frombuffer(data, dtype=torch.uint8, count=n_bytes, offset=start)
    # An untyped storage can be used with any type, so it needs the largest alignment.
    alignment = dtype.itemsize if dtype.itemsize > 1 else 8
    return numbers if start % alignment == 0 else numbers.clone()


def checked_size(size: object, available: int) -> tuple[int, ...]:
    """Check that a shape is valid, and has no more than the available numbers."""
    is_list = isinstance(size, tuple | list)
    sizes = [n for n in size if type(n) is int and n >= 0] if is_list else []
    # A zero must not hide absurd other dimensions.
    if (
        not is_list
        or not len(sizes) == len(size) <= _MAX_DIMS
        or math.prod(max(n, 1) for n in sizes) >= 2**62
        or math.prod(sizes) > available
    ):
        raise CheckpointError(
            f"a tensor has no shape of up to {_MAX_DIMS} dimensions, or more than the "
            f"{available:,} numbers stored"
        )
    return tuple(sizes)
