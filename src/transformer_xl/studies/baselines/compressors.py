"""General compressors, by libraries: gzip, bzip2, xz and PPMd.

They predict a text from its own beginning, or in addition from a text before it
(:func:`compressed_bytes`).
"""

import bz2
import gzip
import lzma
from collections.abc import Callable
from functools import partial

from transformer_xl.data import optional_package

PPMD_ORDERS = (4, 6, 8, 12, 16)
"""Orders of PPMd (variant H, as in 7-Zip) that are tried: bytes of context at most. The best is
reported. Its size is that of the stream, which does not hold the order, a byte of a file."""
PPMD_BYTES = (64 << 20, 2 << 30)
"""Least and most memory of PPMd, 48 times the data. When it is full the model starts anew."""
_XZ_REACH = 64 << 20
_EXTREME = 9 | lzma.PRESET_EXTREME


def _xz(data: bytes, reach: int) -> bytes:
    if reach <= _XZ_REACH:
        return lzma.compress(data, preset=_EXTREME)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": _EXTREME, "dict_size": reach}]
    return lzma.compress(data, filters=filters)


def _ppmd(data: bytes, reach: int, *, order: int) -> bytes:
    pyppmd = optional_package("pyppmd", "the compressor PPMd")
    least, most = PPMD_BYTES
    size = min(max(48 * len(data), least), most)
    return pyppmd.compress(data, max_order=order, mem_size=size, variant="H")


COMPRESSORS: dict[str, tuple[Callable[[bytes, int], bytes], ...]] = {
    "gzip -9": (lambda data, reach: gzip.compress(data, 9, mtime=0),),
    "bzip2 -9": (lambda data, reach: bz2.compress(data, 9),),
    "xz -9e": (_xz,),
    "PPMd": tuple(partial(_ppmd, order=order) for order in PPMD_ORDERS),
}
"""Ways to compress, by name; of several the best counts. Each is given the data and how far back a
repetition should be found, in bytes; 0: as usual."""


def compressed_bytes(name: str, text: bytes, before: bytes = b"") -> int:
    """Return how many bytes a text takes that follows another one.

    For a fair comparison with models that were trained on a training text, it is the text
    ``before``: counted is compressed(before + text) - compressed(before), which is what the text
    adds for one who has the other already. xz is given a window that covers both, PPMd
    the memory for both (`PPMD_BYTES`). gzip finds nothing that is more than 32 KiB back, and bzip2
    nothing outside a block of 900 kB: they gain little by it.

    Args:
        name: One of `COMPRESSORS`.
        text: What to compress.
        before: The text before it. Empty: none, and the size is that of the compressor alone.

    Raises:
        DataError: Its package is missing.

    Example:
        >>> text = bytes(range(256))
        >>> compressed_bytes("xz -9e", text) > 256, compressed_bytes("xz -9e", text, text) < 50
        (True, True)
    """
    ways = COMPRESSORS[name]
    if not before:
        return min(len(way(text, 0)) for way in ways)
    reach = len(before) + len(text)
    return min(len(way(before + text, reach)) - len(way(before, reach)) for way in ways)
