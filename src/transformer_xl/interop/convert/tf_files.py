"""Checkpoints of TensorFlow's ``Saver``, read without TensorFlow.

``model.ckpt-0.index`` is a sorted table from the names of variables to their positions in the files
``model.ckpt-0.data-00000-of-00001``, ...; ``model.ckpt-0.meta`` is a graph and not needed::

    table:  block, block, ..., index block, footer
    block:  entries (shared bytes of the key, own bytes, bytes of the value), restarts, their count,
            compression, checksum
"""

import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from transformer_xl.errors import CheckpointError
from transformer_xl.interop.convert.closed_unpickler import printable
from transformer_xl.interop.convert.mapped_files import checked_size, map_file, on_file, reading
from transformer_xl.interop.convert.protobuf import fields, varint

_FOOTER_SIZE = 48
_MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
_MAX_INDEX = 1 << 24
_MAX_SHARDS = 10_000

# TensorFlow's enumeration of numeric types; others, such as strings, are skipped.
_DTYPES = {1: torch.float32, 2: torch.float64, 3: torch.int32, 4: torch.uint8, 5: torch.int16}
_DTYPES |= {6: torch.int8, 9: torch.int64, 10: torch.bool, 14: torch.bfloat16, 19: torch.float16}


# Index of its file, offset, size in bytes, name, type and shape.
_Variable = tuple[int, int, int, str, torch.dtype, tuple[int, ...]]


def read_tensorflow(index: Path) -> dict[str, Tensor]:
    """Read all numeric variables; they are memory-mapped, so the files must not change."""
    with reading(index):
        variables, n_shards = _variables(index)
    tensors: dict[str, Tensor] = {}
    shards: dict[int, tuple[mmap.mmap, int]] = {}
    # In the order of the files, to detect overlaps.
    for shard, start, n_bytes, name, dtype, shape in sorted(variables, key=lambda x: x[:4]):
        path = index.with_name(f"{index.stem}.data-{shard:05d}-of-{n_shards:05d}")
        with reading(path):
            data, free = shards[shard] if shard in shards else (map_file(path), 0)
            if start < free:
                raise CheckpointError(f"its variable {printable(name)} overlaps another")
            size = checked_size(shape, n_bytes // dtype.itemsize)
            if math.prod(size) * dtype.itemsize != n_bytes:
                raise CheckpointError(
                    f"its variable {printable(name)} has {n_bytes:,} bytes, which is not what its "
                    "shape needs"
                )
            tensors[name] = on_file(data, start, n_bytes, dtype).view(dtype).view(size)
            shards[shard] = data, start + n_bytes
    return tensors


def _variables(index: Path) -> tuple[list[_Variable], int]:
    """Read the table of a checkpoint: its variables, and the number of data files."""
    data = map_file(index)
    if len(data) < _FOOTER_SIZE or data[-8:] != _MAGIC:
        raise CheckpointError(
            f"{index} is not an index of a TensorFlow checkpoint, or it was not copied completely"
        )
    if len(data) > _MAX_INDEX:
        raise CheckpointError(f"{index} has {len(data):,} bytes, too many for an index")
    content = bytes(data)
    data.close()
    (_, _, start, size), _ = _varints(content[-_FOOTER_SIZE:], 0, 4)
    entries: dict[bytes, bytes] = {}
    n_read = n_names = 0
    for _, handle in _entries(_block(content, start, size)):
        (start, size), _ = _varints(handle, 0, 2)
        n_read += size
        # A hostile file could list a block any number of times.
        if n_read > len(content):
            raise CheckpointError(f"{index} lists blocks more than once")
        for name, entry in _entries(_block(content, start, size)):
            # Prefixes of names are shared, so few bytes can expand to long names.
            n_names += len(name)
            if n_names > 50 * len(content):
                raise CheckpointError(f"{index} has names of absurd length")
            entries[name] = entry
    header = dict(fields(entries.pop(b"", b"")))
    n_shards = header.get(1, 1)
    if header.get(2, 0) != 0:
        raise CheckpointError(f"{index} was written by a big-endian machine: convert it there")
    if not isinstance(n_shards, int) or not 0 < n_shards <= _MAX_SHARDS:
        raise CheckpointError(f"{index} claims an absurd number of files")
    variables = (_variable(key.decode(), value, n_shards) for key, value in entries.items())
    return [variable for variable in variables if variable is not None], n_shards


def _variable(name: str, entry: bytes, n_shards: int) -> _Variable | None:
    values = dict(fields(entry))
    if 7 in values:
        raise CheckpointError(
            f"its variable {printable(name)} is stored in slices (a partitioner was used): "
            "restore it with TensorFlow and save it without a partitioner"
        )
    kind, shard, start, n_bytes = (values.get(number, 0) for number in (1, 3, 4, 5))
    if kind not in _DTYPES:
        return None
    if shard >= n_shards:
        raise CheckpointError(f"its variable {printable(name)} is in a file that does not exist")
    dimensions = [value for number, value in fields(values.get(2, b"")) if number == 2]
    # A dimension of size 0 is omitted.
    shape = tuple(dict(fields(dimension)).get(1, 0) for dimension in dimensions)
    return shard, start, n_bytes, name, _DTYPES[kind], shape


def _block(content: bytes, start: int, size: int) -> bytes:
    end = start + size
    if end + 5 > len(content):
        raise CheckpointError("its table reaches beyond its end: it was not copied completely")
    if content[end]:
        raise CheckpointError("its table is compressed, which TensorFlow does not do")
    masked = (int.from_bytes(content[end + 1 : end + 5], "little") - 0xA282EAD8) % 2**32
    if crc32c(content[start : end + 1]) != (masked >> 17 | masked << 15) % 2**32:
        raise CheckpointError("its table is damaged, its checksum is another: get a fresh copy")
    return content[start:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    n_restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 - 4 * n_restarts
    if len(block) < 4 or end < 0:
        raise CheckpointError("its table is damaged: get a fresh copy")
    position, key = 0, b""
    while position < end:
        (shared, added, length), position = _varints(block, position, 3)
        if shared > len(key) or position + added + length > end:
            raise CheckpointError("its table is damaged: get a fresh copy")
        key = key[:shared] + block[position : position + added]
        position += added
        if len(key) > 4096:
            raise CheckpointError("its table has a name of absurd length")
        yield key, block[position : position + length]
        position += length


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
