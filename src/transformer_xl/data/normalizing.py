"""Text as the programs of any system write it, read as UTF-8 with LF line ends.

Files that are prepared, evaluated or scored go through :class:`Normalizer`: CR LF and CR become
LF, and a byte-order mark (BOM) is left out. Other characters stay, among them those that some
programs take for line ends: form feed, NEL, U+2028.
"""

from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Iterable, Iterator

from transformer_xl.errors import DataError

_MARKS = (BOM_UTF8, BOM_UTF16_LE, BOM_UTF16_BE)
_DESCRIBED = {
    "CR LF": "{:,} CR LF to LF",
    "CR": "{:,} CR to LF",
    "BOM": "{:,} BOM left out",
    "line end": "{:,} line end added between files",
}


class Normalizer:
    """Normalizes a stream of bytes; the result does not depend on the blocks in which it comes.

    Bytes that are not UTF-8 stay as they are.

    Attributes:
        changes: How often each kind of change was made.

    Args:
        name: The text, in errors.
        remedy: What reads the bytes as they are, in errors, if anything does.
    """

    def __init__(self, name: str, remedy: str = "") -> None:
        self.changes: Counter[str] = Counter()
        self._name, self._remedy = name, remedy and f"; {remedy}"
        self._head: bytes | None = b""
        self._n_read = 0
        self._ends_with_cr = False

    def push(self, block: bytes, *, is_over: bool = False) -> bytes:
        """Add a block, the last one if the text ``is_over``; return what can be told of the text.

        Raises:
            DataError: It is UTF-16: it begins with the BOM of that, or has a zero byte.
        """
        if self._head is not None:
            block = self._head + block
            is_short = len(block) < len(BOM_UTF8) and not is_over
            if is_short and any(mark.startswith(block) for mark in _MARKS):
                self._head = block
                return b""
            self._head = None
            is_utf16 = block.startswith(_MARKS[1:])
            block = self._without_mark(block)
            self._n_read = self.changes["BOM"] * len(BOM_UTF8)
            if is_utf16:
                raise self._refusal(0, f"0x{block[0]:02x}, as in UTF-16")
        if (place := block.find(0)) >= 0:
            raise self._refusal(self._n_read + place, "zero, as in UTF-16 and in no UTF-8 text")
        self._n_read += len(block)
        return self._with_lf(block)

    def blocks(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield a text in blocks as it is read; an empty block, for a pause, stays one."""
        for block in blocks:
            if (text := self.push(block)) or not block:
                yield text
        if text := self.push(b"", is_over=True):
            yield text

    @staticmethod
    def describe(changes: Counter[str]) -> str:
        """Describe what was changed, with counts; empty if nothing was."""
        return ", ".join(how.format(changes[x]) for x, how in _DESCRIBED.items() if changes[x])

    def of_text(self, text: str) -> str:
        """Return a text that is whole and decoded already, as a prompt is."""
        data = self._without_mark(text.encode("utf-8", "surrogatepass"))
        return self._with_lf(data).decode("utf-8", "surrogatepass")

    def _without_mark(self, head: bytes) -> bytes:
        self.changes["BOM"] += head.startswith(BOM_UTF8)
        return head.removeprefix(BOM_UTF8)

    def _refusal(self, place: int, what: str) -> DataError:
        return DataError(
            f"{self._name}: byte {place:,} is {what}. Convert the file, as with iconv -f UTF-16 "
            f"-t UTF-8{self._remedy}"
        )

    def _with_lf(self, data: bytes) -> bytes:
        if self._ends_with_cr and data:
            self._ends_with_cr = False
            if data.startswith(b"\n"):
                # The CR was counted, and written as LF, at the end of the last block.
                data = data[1:]
                self.changes.update({"CR": -1, "CR LF": 1})
        if b"\r" not in data:
            return data
        self._ends_with_cr = data.endswith(b"\r")
        n_both = data.count(b"\r\n")
        self.changes.update({"CR": data.count(b"\r") - n_both, "CR LF": n_both})
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
