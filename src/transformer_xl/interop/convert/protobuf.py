"""Messages of Protocol Buffers, as TensorFlow writes them."""

from collections.abc import Iterator
from typing import Any


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field: an integer, or the bytes of anything else."""
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = varint(message, at)
            yield key >> 3, value
            continue
        if kind == 2:
            length, at = varint(message, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError("this is no message in the protocol-buffer encoding")
        if at + length > len(message):
            raise ValueError("the message ends too early")
        yield key >> 3, message[at : at + length]
        at += length


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Read the integer that begins at a place; return it and where it ends."""
    value = 0
    for i, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value, at + i + 1
    raise ValueError("a number in the message has no end")
