"""Checkpoints of TensorFlow's ``Saver``, read without TensorFlow.

``model.ckpt-0.index`` is a sorted table from the names of variables to their positions in the files
``model.ckpt-0.data-00000-of-00001``, ...; ``model.ckpt-0.meta`` is a graph and not needed::

    table:  block, block, ..., index block, footer
    block:  entries (shared bytes of the key, own bytes, bytes of the value), restarts, their count,
            compression, checksum
"""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_xl.config import read_small_file
from transformer_xl.errors import CheckpointError
from transformer_xl.interop.convert.closed_unpickler import printable
from transformer_xl.interop.convert.mapped_files import checked_size, map_file, on_file, reading

_FOOTER_SIZE = 48
_MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
_MAX_INDEX = 1 << 24

# TensorFlow's enumeration of numeric types; others, such as strings, are skipped.
_DTYPES = {1: torch.float32, 2: torch.float64, 3: torch.int32, 4: torch.uint8, 5: torch.int16}
_DTYPES |= {6: torch.int8, 9: torch.int64, 10: torch.bool, 14: torch.bfloat16, 19: torch.float16}


# Index of its file, offset, size in bytes, name, type and shape.
_Variable = tuple[int, int, int, str, torch.dtype, tuple[int, ...]]


def read_tensorflow(index: Path) -> dict[str, Tensor]:
    """Read all numeric variables; they are memory-mapped, so the files must not change."""
    with reading(index):
        variables, n_shards = _variables(index)
        names = [f"{index.stem}.data-{i:05d}-of-{n_shards:05d}" for i, *_ in variables]
        # In the order of the files, to detect overlaps.
        in_order = sorted(zip(variables, names, strict=True), key=lambda x: x[0][:4])
    tensors: dict[str, Tensor] = {}
    last, data, free = None, None, 0
    for (shard, start, n_bytes, name, dtype, shape), file in in_order:
        path = index.with_name(file)
        with reading(path):
            if data is None or shard != last:
                last, data, free = shard, map_file(path), 0
            size = checked_size(shape, n_bytes // dtype.itemsize)
            if start < free or math.prod(size) * dtype.itemsize != n_bytes:
                raise CheckpointError(
                    f"its variable {printable(name)} overlaps another, or has {n_bytes:,} bytes, "
                    "which is not what its shape needs"
                )
            tensors[name] = on_file(data, start, n_bytes, dtype).view(dtype).view(size)
            free = start + n_bytes
    return tensors


def _variables(index: Path) -> tuple[list[_Variable], int]:
    """Read the table of a checkpoint: its variables, and the number of data files."""
    content = read_small_file(index, _MAX_INDEX)
    if content[-8:] != _MAGIC:
        raise CheckpointError(
            f"{index} is not an index of a TensorFlow checkpoint, or it was not copied completely"
        )
    (_, _, start, size), _ = _varints(content[-_FOOTER_SIZE:], 0, 4)
    entries: dict[bytes, bytes] = {}
    free = 0
    for handle in _entries(_block(content, start, size)).values():
        (start, size), _ = _varints(handle, 0, 2)
        # A hostile file could list a block any number of times.
        if start < free:
            raise CheckpointError(f"{index} lists blocks more than once")
        free = start + size
        entries |= _entries(_block(content, start, size))
    header = dict(fields(entries.pop(b"", b"")))
    if header.get(2, 0) != 0:
        raise CheckpointError(f"{index} was written by a big-endian machine: convert it there")
    variables = (_variable(key.decode(), value) for key, value in entries.items())
    return [variable for variable in variables if variable is not None], header.get(1, 1)


def _variable(name: str, entry: bytes) -> _Variable | None:
    values = dict(fields(entry))
    if 7 in values:
        raise CheckpointError(
            f"its variable {printable(name)} is stored in slices (a partitioner was used): "
            "restore it with TensorFlow and save it without a partitioner"
        )
    kind, shard, start, n_bytes = (values.get(number, 0) for number in (1, 3, 4, 5))
    if kind not in _DTYPES:
        return None
    dimensions = [value for number, value in fields(values.get(2, b"")) if number == 2]
    # A dimension of size 0 is omitted.
    shape = tuple(dict(fields(x)).get(1, 0) for x in dimensions)
    return shard, start, n_bytes, name, _DTYPES[kind], shape


def _block(content: bytes, start: int, size: int) -> bytes:
    end = start + size
    if content[end]:
        raise CheckpointError("its table is compressed, which TensorFlow does not do")
    masked = (int.from_bytes(content[end + 1 : end + 5], "little") - 0xA282EAD8) % 2**32
    if crc32c(content[start : end + 1]) != (masked >> 17 | masked << 15) % 2**32:
        raise CheckpointError("its table is damaged, its checksum is another: get a fresh copy")
    return content[start:end]


def _entries(block: bytes) -> dict[bytes, bytes]:
    """Return the entries of a block, which has its checksum."""
    entries: dict[bytes, bytes] = {}
    end = len(block) - 4 - 4 * int.from_bytes(block[-4:], "little")
    position, key, n_names = 0, b"", 0
    while position < end:
        (shared, added, length), position = _varints(block, position, 3)
        key = key[:shared] + block[position : position + added]
        # Names share prefixes, so few bytes can expand to long ones.
        n_names += len(key)
        if n_names > 50 * len(block):
            raise CheckpointError("its table has names of absurd length")
        position += added
        entries[key] = block[position : position + length]
        position += length
    return entries


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a message of Protocol Buffers.

    A value is an integer, or the bytes of anything else.
    """
    position = 0
    while position < len(message):
        key, position = varint(message, position)
        if key & 7 == 0:
            value, position = varint(message, position)
            yield key >> 3, value
            continue
        length = {1: 8, 5: 4}.get(key & 7)
        if length is None:
            length, position = varint(message, position)
        if key & 7 not in (1, 2, 5) or position + length > len(message):
            raise ValueError("this is no message in the protocol-buffer encoding, or it is cut")
        yield key >> 3, message[position : position + length]
        position += length


def varint(data: bytes, position: int) -> tuple[int, int]:
    """Read the integer that begins at a position; return it and where it ends."""
    value = 0
    for i in range(10):
        byte = data[position + i]
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value, position + i + 1
    raise ValueError("a number in the message has no end")


def _varints(data: bytes, position: int, n: int) -> tuple[list[int], int]:
    numbers = []
    for _ in range(n):
        value, position = varint(data, position)
        numbers.append(value)
    return numbers, position


_CRC_TABLE = list(range(256))
for _ in range(8):
    _CRC_TABLE = [x >> 1 ^ (0x82F63B78 if x & 1 else 0) for x in _CRC_TABLE]


def crc32c(content: bytes) -> int:
    """Return the checksum that TensorFlow uses."""
    value = 0xFFFFFFFF
    for byte in content:
        value = _CRC_TABLE[(value ^ byte) & 255] ^ value >> 8
    return value ^ 0xFFFFFFFF
