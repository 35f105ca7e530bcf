"""Changes of a text that bring it nearer to what models were trained on, and can be undone.

Shipped models were trained on text with line feeds alone, indented with spaces, mostly in small
letters. A text that mostly has the other is changed: both are swapped, so that the few places that
had what the models know come back, too. Each transform is only used where undoing it restores every
byte.
"""

import codecs
import re
import string
from collections.abc import Callable
from typing import NamedTuple

TAB = b"    "
"""What stands for a tab at the beginning of a line."""
MOST_SHRUNK, MOST_GROWN = 2 * len(TAB), len(TAB)
"""How many times as large as its transform a text can be, and the reverse."""
_CR_LF, _LF = re.compile(rb"\r\n"), re.compile(rb"(?<!\r)\n")
_LINE_END = re.compile(rb"\r?\n")
_TABS, _SPACES = (re.compile(rb"^%s+(?![ \t])" % x, re.M) for x in (rb"\t", rb"(?: {4})"))
_INDENTED = re.compile(_TABS.pattern + b"|" + _SPACES.pattern, re.M)
_LETTERS = string.ascii_uppercase, string.ascii_lowercase
_LEAST_CAPITALS = 4
"""One byte in so many is a capital, or it is not a text in capitals."""


class Transform(NamedTuple):
    """A change of a text: the functions take and return all of it."""

    apply: Callable[[bytes], bytes]
    undo: Callable[[bytes], bytes]


def _line_ends(text: bytes) -> bytes:
    """Swap CR LF and LF."""
    return _LINE_END.sub(lambda end: b"\n" if len(end[0]) > 1 else b"\r\n", text)


def _indentation(text: bytes) -> bytes:
    """Swap tabs and groups of spaces in lines that are indented with one of both alone."""

    def swapped(line: re.Match[bytes]) -> bytes:
        n = len(line[0])
        return b"\t" * (n // len(TAB)) if line[0].startswith(b" ") else TAB * n

    return _INDENTED.sub(swapped, text)


def _mostly(first: re.Pattern[bytes], second: re.Pattern[bytes], text: bytes) -> bool:
    """Whether a text has more of the first pattern than of the second."""
    return len(first.findall(text)) > len(second.findall(text))


def _is_in_capitals(text: bytes) -> bool:
    n_capitals, n_small = (sum(map(text.count, letters.encode())) for letters in _LETTERS)
    return n_capitals > max(n_small, len(text) // _LEAST_CAPITALS)


TRANSFORMS = (
    # A byte order mark.
    Transform(lambda x: x.removeprefix(codecs.BOM_UTF8), lambda x: codecs.BOM_UTF8 + x),
    # Carriage returns, where most lines end with one.
    Transform(lambda x: _line_ends(x) if _mostly(_CR_LF, _LF, x) else x, _line_ends),
    # Tabs that indent.
    Transform(lambda x: _indentation(x) if _mostly(_TABS, _SPACES, x) else x, _indentation),
    # Capitals.
    Transform(lambda x: x.swapcase() if _is_in_capitals(x) else x, bytes.swapcase),
)
"""By the number of their bit in the header of an archive."""


def changed(text: bytes, n: int) -> bytes | None:
    """Apply transform ``n``; None: it changes nothing, or could not be undone."""
    result = TRANSFORMS[n].apply(text)
    return result if result != text and TRANSFORMS[n].undo(result) == text else None


def applied(text: bytes) -> tuple[bytes, int]:
    """Apply the transforms that change a text and can be undone.

    Returns:
        The changed text, and which transforms were applied, a bit for each.
    """
    used = 0
    for n in range(len(TRANSFORMS)):
        if (result := changed(text, n)) is not None:
            text, used = result, used | 1 << n
    return text, used


def undone(text: bytes, used: int) -> bytes:
    """Undo the transforms that were applied to a text."""
    for n, transform in reversed([*enumerate(TRANSFORMS)]):
        if used >> n & 1:
            text = transform.undo(text)
    return text
