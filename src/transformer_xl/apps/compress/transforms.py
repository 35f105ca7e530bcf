"""Changes of a text that bring it nearer to what models were trained on, and can be undone.

Shipped models were trained on text with line feeds alone, indented with spaces, mostly in small
letters. Each transform is only used where undoing it restores every byte.
"""

import codecs
import re
import string
from collections.abc import Callable
from typing import NamedTuple

TAB = b"    "
"""What stands for a tab at the beginning of a line."""
MOST_SHRUNK, MOST_GROWN = 2, len(TAB)
"""Bounds of the size of a text relative to that of its transform, and the reverse."""
_INDENTED = re.compile(rb"^\t+(?! )", re.M)
_WITH_SPACES = re.compile(rb"^(?: {4})+(?! )", re.M)


class Transform(NamedTuple):
    """A change of a text: the functions take and return all of it."""

    apply: Callable[[bytes], bytes]
    undo: Callable[[bytes], bytes]


def _indented_with_spaces(text: bytes) -> bytes:
    """Indent with spaces, if tabs do nothing but indent, as in code and not in a table."""
    changed = _INDENTED.sub(lambda tabs: TAB * len(tabs[0]), text)
    return text if b"\t" in changed else changed


def _indented_with_tabs(text: bytes) -> bytes:
    return _WITH_SPACES.sub(lambda spaces: b"\t" * (len(spaces[0]) // len(TAB)), text)


def _swapped(text: bytes) -> bytes:
    """Swap capitals and small letters of ASCII in a text most of whose bytes are capitals."""
    n_capitals = sum(map(text.count, string.ascii_uppercase.encode()))
    return text.swapcase() if 2 * n_capitals > len(text) else text


TRANSFORMS = (
    # A byte order mark.
    Transform(lambda x: x.removeprefix(codecs.BOM_UTF8), lambda x: codecs.BOM_UTF8 + x),
    # Carriage returns.
    Transform(lambda x: x.replace(b"\r\n", b"\n"), lambda x: x.replace(b"\n", b"\r\n")),
    # Tabs that indent.
    Transform(_indented_with_spaces, _indented_with_tabs),
    # Capitals.
    Transform(_swapped, bytes.swapcase),
)
"""By the number of their bit in the header of an archive."""


def applied(text: bytes) -> tuple[bytes, int]:
    """Apply the transforms that change a text and can be undone.

    Returns:
        The changed text, and which transforms were applied, a bit for each.
    """
    used = 0
    for n, transform in enumerate(TRANSFORMS):
        changed = transform.apply(text)
        if changed != text and transform.undo(changed) == text:
            text, used = changed, used | 1 << n
    return text, used


def undone(text: bytes, used: int) -> bytes:
    """Undo the transforms that were applied to a text."""
    for n, transform in reversed([*enumerate(TRANSFORMS)]):
        if used >> n & 1:
            text = transform.undo(text)
    return text
