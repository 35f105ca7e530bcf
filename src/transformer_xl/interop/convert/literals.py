"""Numbers and texts that a pickle of protocol 0 holds as lines."""

import re

from transformer_xl.interop.convert.inert import UnreadableFile

_MAX_DIGITS = 1000
_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([0-7]{1,3})|(.))", re.DOTALL)
_ESCAPED = dict(zip(b"abfnrtv'\"\\", b"\a\b\f\n\r\t\v'\"\\", strict=True))


def parse_int(line: bytes) -> int:
    """Return the number that a line holds.

    Raises:
        UnreadableFile: It has too many digits to be one of a checkpoint.
    """
    # The time that Python takes grows with the square.
    if len(line) > _MAX_DIGITS:
        raise UnreadableFile(f"the pickle has a number of {len(line):,} digits")
    return int(line)


def unquote(line: bytes) -> str:
    """Return the text of Python 2 that a line holds in quotation marks, as Latin-1.

    Raises:
        UnreadableFile: It has none.
    """
    line = line.strip()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise UnreadableFile("the pickle has a text without quotation marks")
    text = line[1:-1]
    return (_ESCAPE.sub(_character, text) if b"\\" in text else text).decode("latin-1")


def _character(found: re.Match[bytes]) -> bytes:
    hexadecimal, octal, other = found.groups()
    if hexadecimal:
        return bytes([int(hexadecimal, 16)])
    if octal:
        return bytes([int(octal, 8) & 255])
    # What is unknown stays as it is, as in Python.
    return bytes([_ESCAPED[other[0]]]) if other[0] in _ESCAPED else b"\\" + other
