"""Numbers of a file as tensors that lie on the file itself, after every length was checked."""

import math
import mmap
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_xl.interop.convert.inert import UnreadableFile

MAX_DIMS = 8

STORAGE_DTYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in STORAGE_DTYPES.values()} | {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "long": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
}


class _Layout(NamedTuple):
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Storage:
    """A row of numbers in a file, on which any number of tensors may lie.

    Args:
        dtype: Of what type the numbers are.
        numel: How many there are.
    """

    def __init__(self, dtype: torch.dtype, numel: int) -> None:
        self.dtype = dtype
        self.numel = numel
        self._bytes: Tensor | None = None
        self._flat: dict[torch.dtype, Tensor] = {}
        # A legacy file says where its numbers are behind what lies on them.
        self._waiting: list[tuple[Tensor, _Layout]] = []

    @property
    def n_bytes(self) -> int:
        """How many bytes the numbers take."""
        return self.numel * self.dtype.itemsize

    def place(self, data: mmap.mmap, start: int) -> None:
        """Say where the numbers are, and give them to the tensors that wait.

        Raises:
            UnreadableFile: They are not all in the file.
        """
        if start < 0 or start + self.n_bytes > len(data):
            raise UnreadableFile(
                f"numbers up to byte {start + self.n_bytes:,} are announced and the file has "
                f"{len(data):,} bytes: it was not copied completely"
            )
        # Of an untyped storage it is not known what will lie on it.
        alignment = self.dtype.itemsize if self.dtype.itemsize > 1 else 8
        self.use(on_file(data, start, self.n_bytes, alignment))

    def place_on(self, other: "Storage", first: int) -> None:
        """Say that the numbers are some of those of another storage.

        Raises:
            UnreadableFile: They are not all in it.
        """
        start = first * self.dtype.itemsize
        if other._bytes is None or first < 0 or start + self.n_bytes > other.n_bytes:
            raise UnreadableFile("a part of a storage does not lie in it")
        self.use(other._bytes[start : start + self.n_bytes])

    def use(self, numbers: Tensor) -> None:
        """Take the bytes of a tensor for the numbers."""
        self._bytes = numbers
        for tensor, layout in self._waiting:
            tensor.set_(self._view(tensor.dtype, layout))  # pyright: ignore[reportArgumentType]
        self._waiting.clear()

    def tensor(
        self, offset: object, size: object, stride: object, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return a tensor that lies on the numbers.

        Raises:
            UnreadableFile: It would lie beside them, or hold more numbers than there are.
        """
        dtype = dtype or self.dtype
        layout = _layout(offset, size, stride, self.n_bytes // dtype.itemsize)
        if self._bytes is not None:
            return self._view(dtype, layout)
        tensor = torch.empty(0, dtype=dtype)
        self._waiting.append((tensor, layout))
        return tensor

    def _view(self, dtype: torch.dtype, layout: _Layout) -> Tensor:
        assert self._bytes is not None
        if dtype not in self._flat:
            whole = self.n_bytes // dtype.itemsize * dtype.itemsize
            self._flat[dtype] = self._bytes[:whole].view(dtype)
        flat = self._flat[dtype]
        return flat.as_strided(layout.size, layout.stride, flat.storage_offset() + layout.offset)


def on_file(data: mmap.mmap, start: int, n_bytes: int, alignment: int) -> Tensor:
    """Return bytes of a mapped file as a tensor: on the file itself, or aligned in memory."""
    if not n_bytes:
        return torch.empty(0, dtype=torch.uint8)
    found = torch.frombuffer(data, dtype=torch.uint8, count=n_bytes, offset=start)
    return found if start % alignment == 0 else found.clone()


def checked_size(size: object, available: int) -> tuple[int, ...]:
    """Check that a shape is one, and holds no more than the available numbers.

    Raises:
        UnreadableFile: It is none, or holds more.
    """
    if not isinstance(size, tuple | list) or len(size) > MAX_DIMS:
        raise UnreadableFile(f"a tensor has no shape of up to {MAX_DIMS} dimensions")
    if any(type(n) is not int or n < 0 for n in size):
        raise UnreadableFile("a tensor has a dimension that is no count")
    # A zero must not hide that the others are absurd.
    if math.prod(max(n, 1) for n in size) >= 2**62:
        raise UnreadableFile("a tensor has absurd dimensions")
    if math.prod(size) > available:
        raise UnreadableFile(f"a tensor holds more than the {available:,} numbers stored")
    return tuple(size)


def _layout(offset: object, size: object, stride: object, available: int) -> _Layout:
    size = checked_size(size, available)
    if not isinstance(stride, tuple | list) or len(stride) != len(size):
        raise UnreadableFile("a tensor has a stride that does not belong to its shape")
    if type(offset) is not int or not 0 <= offset <= available:
        raise UnreadableFile("a tensor begins outside of the numbers stored")
    if any(type(step) is not int or not 0 <= step < 2**62 for step in stride):
        raise UnreadableFile("a tensor has a stride that is no count")
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and offset + last >= available:
        raise UnreadableFile(f"a tensor reaches beyond the {available:,} numbers stored")
    if any(n > 1 and not step for n, step in zip(size, stride, strict=True)):
        raise UnreadableFile("a tensor repeats numbers instead of storing them")
    return _Layout(offset, size, tuple(stride))
