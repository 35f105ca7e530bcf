"""Files that may be damaged or hostile: their errors, and tensors on memory-mapped files."""

import json
import math
import mmap
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_xl.config import read_small_file
from transformer_xl.errors import CheckpointError

_MAX_JSON_BYTES = 4 << 20
_MAX_DIMS = 8


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn all errors of reading a damaged file into :class:`CheckpointError`."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        text = f"damaged or of another kind ({type(error).__name__}): get a fresh copy of it"
        text = str(error) if isinstance(error, CheckpointError) else text
        raise CheckpointError(text if str(path) in text else f"{path}: {text}") from error


def map_file(path: Path) -> mmap.mmap:
    """Memory-map a file copy-on-write, as tensors need writable memory."""
    mode = path.stat()
    if not stat.S_ISREG(mode.st_mode):
        raise CheckpointError(f"{path} is not a regular file: give the checkpoint itself")
    if not mode.st_size:
        raise CheckpointError(f"{path} is empty: get a fresh copy of it")
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from an untrusted JSON file."""
    try:
        content = json.loads(read_small_file(path, _MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a JSON file, or damaged ({error}): restore it from a copy"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__}, not an object: restore it from a copy"
        )
    return content


def on_file(data: mmap.mmap, start: int, n_bytes: int, dtype: torch.dtype) -> Tensor:
    """Return bytes of a mapped file as a tensor: a view, or a copy if they are not aligned."""
    if start < 0 or start + n_bytes > len(data):
        raise CheckpointError(
            f"numbers up to byte {start + n_bytes:,} are expected and the file has "
            f"{len(data):,} bytes: it was not copied completely"
        )
    if not n_bytes:
        return torch.empty(0, dtype=torch.uint8)
    numbers = torch.frombuffer(data, dtype=torch.uint8, count=n_bytes, offset=start)
    # An untyped storage can be used with any type, so it needs the largest alignment.
    alignment = dtype.itemsize if dtype.itemsize > 1 else 8
    return numbers if start % alignment == 0 else numbers.clone()


def checked_size(size: object, available: int) -> tuple[int, ...]:
    """Check that a shape is valid, and has no more than the available numbers."""
    sizes: Any = size if isinstance(size, tuple | list) and len(size) <= _MAX_DIMS else [None]
    if any(type(n) is not int or n < 0 for n in sizes):
        raise CheckpointError(f"a tensor has no shape of up to {_MAX_DIMS} dimensions")
    # A zero must not hide absurd other dimensions.
    if math.prod(max(n, 1) for n in sizes) >= 2**62 or math.prod(sizes) > available:
        raise CheckpointError(f"a tensor holds more than the {available:,} numbers stored")
    return tuple(sizes)
