"""Decoding tokens one at a time."""

import codecs
import copy
from collections.abc import Sequence

from transformer_xl.errors import InputError

EOS = "<eos>"


class StreamDecoder:
    """Decodes tokens one at a time; returns characters as soon as they are complete.

    Tokens that are no bytes are words, joined by spaces; ``eos`` ends a line. If it stands
    ``around`` lines, it begins them, too.
    """

    def __init__(
        self,
        symbols: Sequence[str],
        symbol_bytes: list[bytes] | None,
        eos: str | None = EOS,
        *,
        around: bool = False,
    ) -> None:
        self._symbols, self._bytes = symbols, symbol_bytes
        self._eos, self._around = eos, around
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_open = False
        self._space = ""

    def push(self, token: int) -> str:
        """Decode one token; return the text that it completes."""
        if not 0 <= token < len(self._symbols):
            raise not_a_symbol(token, len(self._symbols))
        if self._bytes is not None:
            return self._utf8.decode(self._bytes[token])
        symbol = self._symbols[token]
        begins_line = self._around and not self._is_open
        self._is_open = symbol != self._eos or begins_line
        if symbol != self._eos:
            return self._join(symbol)
        self._space = ""
        return "" if begins_line else self.flush() + "\n"

    def raw(self, token: int) -> bytes:
        """Return the bytes that a token would add to the text, without decoding it.

        Those of a word are the text that it completes, with the space before it.
        """
        if self._bytes is not None:
            return self._bytes[token]
        return self.fork().push(token).encode()

    def _join(self, word: str) -> str:
        """Return the text that a word completes."""
        text, self._space = self._space + word, " "
        return text

    def flush(self) -> str:
        """End the text; an incomplete character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)

    def pending(self) -> str:
        """Return the text that `flush` would return, and do not end the text."""
        if self._bytes is None:
            return self.fork().flush()
        # Without a copy, as servers ask for each token.
        return "\ufffd" if self._utf8.getstate()[0] else ""

    def fork(self) -> "StreamDecoder":
        """Return an independent copy, to decode another continuation of the same text."""
        other = copy.copy(self)
        if self._bytes is not None:
            other._utf8 = copy.copy(self._utf8)
        return other


def not_a_symbol(number: int, n: int) -> InputError:
    """Return the error for a number that is not an ID of a vocabulary of ``n`` symbols."""
    return InputError(
        f"{number} is not a symbol: this vocabulary has 0 to {n - 1}; decode tokens with the "
        "vocabulary that encoded them, and leave out those of padding"
    )
