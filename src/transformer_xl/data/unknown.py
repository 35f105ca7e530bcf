"""What a text holds that a vocabulary has no symbol for: named, counted, and where it is."""

import re
from collections import Counter

_LISTED = 5
UNDECODED = re.compile("[\udc80-\udcff]")
"""Bytes that are no UTF-8, as ``surrogateescape`` decodes them."""
REMEDY = "a model trained with --data.vocab bytes (or bpe) reads any text"


def describe_unknown(unknown: Counter[str], line: int) -> str:
    """Name the first of some symbols, say how many there are, and where the first one is."""
    names = ", ".join(map(_name, list(unknown)[:_LISTED]))
    more = len(unknown) - _LISTED
    others = f" and {more:,} more" if more > 0 else ""
    return f"{names}{others} ({unknown.total():,} in all, the first in line {line:,})"


def _name(symbol: str) -> str:
    return f"the byte 0x{ord(symbol) - 0xDC00:02x}" if UNDECODED.fullmatch(symbol) else repr(symbol)
