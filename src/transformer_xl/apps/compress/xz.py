"""Data packed with the compression of xz -9e, which needs no model.

The payload is an LZMA stream with its short header (the format .lzma): checksums are in the
archive's own header.
"""

import lzma

from transformer_xl.apps.compress.header import ArchiveError
from transformer_xl.apps.compress.planning import GIGABYTE

_MOST, _LEAST = 1 << 26, 1 << 12
"""Bounds of the dictionary in bytes; the upper one is that of xz -9."""
_RAM_PER_BYTE = 12
"""RAM for compression, as a multiple of the dictionary."""


def pack(data: bytes, ram: float) -> bytes:
    """Compress data, with a dictionary for which there is RAM (in gigabytes)."""
    size = _LEAST
    # More than the data has no effect.
    while size < min(len(data), _MOST) and 2 * size * _RAM_PER_BYTE <= ram * GIGABYTE:
        size *= 2
    extreme = 9 | lzma.PRESET_EXTREME
    filters = [{"id": lzma.FILTER_LZMA1, "preset": extreme, "dict_size": size}]
    return lzma.compress(data, lzma.FORMAT_ALONE, filters=filters)


def unpack(payload: bytes, size: int, ram: float) -> bytes:
    """Decompress data of a known size, which is at most the limit of RAM in gigabytes.

    A few bytes can stand for gigabytes, and the size is what the file says of itself: it is
    checked first, and nothing that is larger is made.

    Raises:
        ArchiveError: The payload is damaged, or the data or the dictionary exceed the limit.
        RuntimeError: There is not enough memory.
    """
    if size > ram * GIGABYTE:
        raise ArchiveError(
            f"it unpacks to {size:,} bytes, and ram={ram:g} GB are allowed; allow more (--ram) if "
            "the file can be trusted"
        )
    decoder = lzma.LZMADecompressor(lzma.FORMAT_ALONE, memlimit=int(ram * GIGABYTE))
    try:
        data = decoder.decompress(payload, size + 1)
    except lzma.LZMAError as error:
        raise ArchiveError(
            f"it cannot be unpacked with xz ({error}): restore it from a copy, or allow more RAM "
            "(--ram) if it is the limit"
        ) from error
    except MemoryError as error:
        raise RuntimeError(f"there is not enough memory for {size:,} bytes") from error
    return data
