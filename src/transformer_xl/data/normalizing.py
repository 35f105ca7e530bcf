"""Text as the programs of any system write it, read as UTF-8 with LF line ends.

Files that are prepared, evaluated or scored go through :class:`Normalizer`: CR LF and CR become
LF, a byte-order mark (BOM) is left out, and UTF-16 with a BOM becomes UTF-8. Other characters stay,
among them those that some programs take for line ends: form feed, NEL, U+2028.
"""

import codecs
from collections import Counter
from collections.abc import Iterable, Iterator

from transformer_xl.errors import DataError

_MARKS = {
    codecs.BOM_UTF8: "",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_LONGEST_MARK = 3
_DESCRIBED = {
    "CR LF": "{:,} CR LF to LF",
    "CR": "{:,} CR to LF",
    "UTF-16": "{:,} from UTF-16 to UTF-8",
    "BOM": "{:,} BOM left out",
    "line end": "{:,} line end added between files",
}


class Normalizer:
    """Normalizes a stream of bytes; the result does not depend on the blocks in which it comes.

    Bytes that are not UTF-8 stay as they are, unless the text begins with the BOM of UTF-16.

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
        self._decoder: codecs.IncrementalDecoder | None = None
        self._n_read = 0
        self._ends_with_cr = False

    def push(self, block: bytes, *, is_over: bool = False) -> bytes:
        """Add a block, the last one if the text ``is_over``; return what can be told of the text.

        Raises:
            DataError: It has a zero byte, as UTF-16 without a BOM has, or is not the UTF-16 of its
                BOM.
        """
        if self._head is not None:
            block = self._head + block
            if (
                len(block) < _LONGEST_MARK
                and not is_over
                and any(x.startswith(block) for x in _MARKS)
            ):
                self._head = block
                return b""
            self._head = None
            block = self._without_mark(block)
        first = self._n_read
        self._n_read += len(block)
        if self._decoder is not None:
            first -= len(self._decoder.getstate()[0])
            try:
                block = self._decoder.decode(block, final=is_over).encode()
            except UnicodeDecodeError as error:
                raise self._refusal(first + error.start, "no UTF-16, though it begins so") from None
        if 0 in block:
            before = block[: block.index(0)]
            before = before if self._decoder is None else before.decode().encode("utf-16-le")
            raise self._refusal(first + len(before), "zero, as in UTF-16 and in no UTF-8 text")
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
        for mark, encoding in _MARKS.items():
            if head.startswith(mark):
                self.changes["UTF-16" if encoding else "BOM"] += 1
                self._decoder = codecs.getincrementaldecoder(encoding)() if encoding else None
                self._n_read = len(mark)
                return head[len(mark) :]
        return head

    def _refusal(self, place: int, what: str) -> DataError:
        return DataError(
            f"{self._name}: byte {place:,} is {what}. Convert the file, as with iconv -f UTF-16LE "
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
