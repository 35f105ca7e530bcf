"""Files that may be damaged or hostile: their errors, and tensors on memory-mapped files."""

import copy
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

from transformer_xl.config.files import read_small_file

_MAX_JSON_BYTES = 4 << 20
_MAX_DIMS = 8

# By the names of the types, and of the classes of storages.
DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float", "double", "half", "long", "int", "short", "bfloat16", "uint8", "bool"),
        *("float16", "float32", "float64", "int8", "int16", "int32", "int64"),
    )
}
DTYPES |= {
    f"{name.title()}Storage": DTYPES[name]
    for name in ("float", "double", "half", "long", "int", "short", "bool")
}
DTYPES |= {"BFloat16Storage": torch.bfloat16, "CharStorage": torch.int8}
DTYPES |= {"ByteStorage": torch.uint8, "UntypedStorage": torch.uint8}


class UnreadableFile(RuntimeError):  # noqa: N818
    """A file is damaged, has another format, or requires something that is refused."""


def printable(x: object) -> str:
    """Return a short text for a value of a file, without line breaks or control characters."""
    # Containers can be of any size and depth.
    text = ascii(x[:120]) if isinstance(x, str | bytes) else f"a value of type {type(x).__name__}"
    return text.strip("'") if isinstance(x, str) else text


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn all errors of reading a damaged file into :class:`UnreadableFile`."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except UnreadableFile as error:
        text = str(error)
        if str(path) not in text:
            text = f"{path}: {text}"
        raise UnreadableFile(text) from error.__cause__
    except Exception as error:
        raise UnreadableFile(
            f"{path} is damaged or of another kind ({type(error).__name__}): get a fresh copy of it"
        ) from error


def map_file(path: Path) -> mmap.mmap:
    """Memory-map a file copy-on-write, as tensors need writable memory."""
    mode = path.stat()
    if not stat.S_ISREG(mode.st_mode):
        raise UnreadableFile(f"{path} is not a regular file: give the checkpoint itself")
    if not mode.st_size:
        raise UnreadableFile(f"{path} is empty: get a fresh copy of it")
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from an untrusted JSON file."""
    try:
        whole = read_small_file(path, _MAX_JSON_BYTES)
    except ValueError as error:
        raise UnreadableFile(f"{error}: give the right file") from error
    try:
        content = json.loads(whole)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(
            f"{path} is not a JSON file, or damaged ({error}): restore it from a copy"
        ) from error
    if not isinstance(content, dict):
        raise UnreadableFile(
            f"{path} holds a {type(content).__name__}, not an object: restore it from a copy"
        )
    return content


class Storage:
    """Numbers in a file, of any number of tensors; they are set by :meth:`place`."""

    def __init__(self, dtype: torch.dtype, numel: int) -> None:
        self.dtype = dtype
        self.numel = numel
        self.n_bytes = numel * dtype.itemsize
        self._first = 0
        self._tensors: list[tuple[Tensor, int, tuple, tuple]] = []

    def part(self, first: int) -> "Storage":
        """Return the storage from one of its numbers on."""
        part = copy.copy(self)
        part._first += first
        return part

    def tensor(self, offset: object, size: object, stride: object, dtype: torch.dtype) -> Tensor:
        """Return a tensor on this storage; check that it is within its bounds."""
        available = self.n_bytes // dtype.itemsize
        size = checked_size(size, available)
        if not isinstance(stride, tuple | list) or len(stride) != len(size):
            raise UnreadableFile("a tensor has a stride that does not belong to its shape")
        if any(type(n) is not int or not 0 <= n < 2**62 for n in (offset, *stride)):
            raise UnreadableFile("a tensor has an offset or a stride that is not a count")
        start = self._first + offset  # pyright: ignore[reportOperatorIssue]
        steps = [(n - 1) * step for n, step in zip(size, stride, strict=True)]
        if (start if 0 in size else start + sum(steps) + 1) > available:
            raise UnreadableFile(f"a tensor reaches beyond the {available:,} numbers stored")
        if any(n > 1 and not step for n, step in zip(size, stride, strict=True)):
            raise UnreadableFile("a tensor repeats numbers instead of storing them")
        tensor = torch.empty(0, dtype=dtype)
        self._tensors.append((tensor, start, size, tuple(stride)))
        return tensor

    def place(self, data: mmap.mmap, start: int) -> None:
        """Set the numbers: those at a position of a mapped file."""
        numbers = on_file(data, start, self.n_bytes, self.dtype)
        for tensor, offset, size, stride in self._tensors:
            whole = self.n_bytes // tensor.itemsize * tensor.itemsize
            flat = numbers[:whole].view(tensor.dtype)
            placed = flat.as_strided(size, stride, flat.storage_offset() + offset)
            tensor.set_(placed)  # pyright: ignore[reportArgumentType]


def on_file(data: mmap.mmap, start: int, n_bytes: int, dtype: torch.dtype) -> Tensor:
    """Return bytes of a mapped file as a tensor: a view, or a copy if they are not aligned."""
    if start < 0 or start + n_bytes > len(data):
        raise UnreadableFile(
            f"numbers up to byte {start + n_bytes:,} are expected and the file has "
            f"{len(data):,} bytes: it was not copied completely"
        )
    if not n_bytes:
        return torch.empty(0, dtype=torch.uint8)
    found = torch.frombuffer(data, dtype=torch.uint8, count=n_bytes, offset=start)
    # An untyped storage can be used with any type, so it needs the largest alignment.
    alignment = dtype.itemsize if dtype.itemsize > 1 else 8
    return found if start % alignment == 0 else found.clone()


def checked_size(size: object, available: int) -> tuple[int, ...]:
    """Check that a shape is valid, and has no more than the available numbers."""
    if not isinstance(size, tuple | list) or len(size) > _MAX_DIMS:
        raise UnreadableFile(f"a tensor has no shape of up to {_MAX_DIMS} dimensions")
    if any(type(n) is not int or n < 0 for n in size):
        raise UnreadableFile("a tensor has a dimension that is not a count")
    # A zero must not hide absurd other dimensions.
    if math.prod(max(n, 1) for n in size) >= 2**62 or math.prod(size) > available:
        raise UnreadableFile(f"a tensor holds more than the {available:,} numbers stored")
    return tuple(size)
