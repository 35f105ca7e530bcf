"""Text as the programs of any system write it, read as UTF-8 with LF line ends.

Files that are prepared, evaluated or scored go through :class:`Normalizer`: CR LF and CR become
LF, a byte-order mark (BOM) is left out, and UTF-16 or UTF-32 with a BOM becomes UTF-8. Other
characters stay, among them those that some programs take for line ends: form feed, NEL, U+2028.
"""

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformer_xl.data.vocab import Vocab

_MARK = "\ufeff".encode()
# UTF-32 first: one of its marks begins like one of UTF-16.
_ENCODINGS = {
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_LONGEST_MARK = 4
_MARKS = re.compile(rb"(?<=\n)(?:\xef\xbb\xbf)+")
_BEGUN_MARK = re.compile(rb"(?<=\n)\xef\xbb?\Z")
# So many bytes tell UTF-16 without a BOM.
_PROBE_BYTES = 512
_DESCRIBED = {
    "CR LF": "{:,} CR LF to LF",
    "CR": "{:,} CR to LF",
    "UTF-16": "{:,} from UTF-16 to UTF-8",
    "UTF-32": "{:,} from UTF-32 to UTF-8",
    "BOM": "{:,} BOM left out",
    "line end": "{:,} line end added between files",
}


class Normalizer:
    """Normalizes a stream of bytes; the result does not depend on the blocks in which it comes.

    Bytes that are not UTF-8 stay as they are, unless the text begins with the BOM of UTF-16 or
    UTF-32. A BOM is left out at the beginning of a line, too, as where files were joined.

    Attributes:
        changes: How often each kind of change was made.
        n_zeros: Number of zero bytes, which text has none of.

    Args:
        name: The text, in errors.
        remedy: What reads the bytes as they are, in errors, if anything does.
    """

    def __init__(self, name: str, remedy: str = "") -> None:
        self.changes: Counter[str] = Counter()
        self.n_zeros = 0
        self._name, self._remedy = name, remedy and f"; {remedy}"
        self._head, self._n_read = b"", 0
        self._decoder: codecs.IncrementalDecoder | None = None
        self._is_known = self._ends_with_cr = False
        self._begins_line, self._held = True, b""

    def push(self, block: bytes) -> bytes:
        """Add a block; return what can be told of the text.

        Raises:
            ValueError: The text is UTF-16 without a BOM, or not the UTF-16 or UTF-32 of its BOM.
        """
        return self._push(block, is_over=False)

    def flush(self) -> bytes:
        """Return the rest, at the end of the text.

        Raises:
            ValueError: As :meth:`push`.
        """
        return self._push(b"", is_over=True)

    def of_text(self, text: str) -> str:
        """Return a text that is whole and decoded already, as a prompt is."""
        data = self._with_lf(text.encode("utf-8", "surrogatepass"))
        return self._without_marks(data, is_over=True).decode("utf-8", "surrogatepass")

    def _push(self, block: bytes, *, is_over: bool) -> bytes:
        block = block if self._is_known else self._recognized(block, is_over=is_over)
        if not self._is_known:
            return b""
        if self._decoder is not None:
            block = self._decoded(self._decoder, block, is_over=is_over)
        elif len(self._head) < _PROBE_BYTES and (block or is_over):
            self._head += block[: _PROBE_BYTES - len(self._head)]
            if len(self._head) == _PROBE_BYTES or is_over:
                self._require_no_utf16(self._head)
        self.n_zeros += block.count(0)
        return self._without_marks(self._with_lf(block), is_over=is_over)

    def _recognized(self, block: bytes, *, is_over: bool) -> bytes:
        """Return the text behind a BOM of UTF-16 or UTF-32, once enough bytes are there."""
        head = self._head + block
        may_be_mark = len(head) < _LONGEST_MARK and any(x.startswith(head) for x in _ENCODINGS)
        if may_be_mark and not is_over:
            self._head = head
            return b""
        self._is_known, self._head = True, b""
        for mark, encoding in _ENCODINGS.items():
            if head.startswith(mark):
                self.changes[encoding[:6].upper()] += 1
                self._decoder = codecs.getincrementaldecoder(encoding)()
                self._n_read = len(mark)
                return head[len(mark) :]
        return head

    def _decoded(self, decoder: codecs.IncrementalDecoder, block: bytes, *, is_over: bool) -> bytes:
        begin = self._n_read - len(decoder.getstate()[0])
        self._n_read += len(block)
        try:
            return decoder.decode(block, final=is_over).encode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self._name} begins with a byte-order mark of {error.encoding.upper()[:6]}, but "
                f"byte {begin + error.start:,} is no such text: convert the file to UTF-8"
                f"{self._remedy}"
            ) from None

    def _require_no_utf16(self, head: bytes) -> None:
        zeros = [head[place::2].count(0) for place in (0, 1)]
        if len(head) >= _LONGEST_MARK and min(zeros) == 0 and max(zeros) * 5 > len(head) * 2:
            order = "BE" if zeros[0] else "LE"
            raise ValueError(
                f"{self._name} seems to be UTF-16 without a byte-order mark (every second byte is "
                f"zero): convert it, as with iconv -f UTF-16{order} -t UTF-8{self._remedy}"
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

    def _without_marks(self, data: bytes, *, is_over: bool) -> bytes:
        before = b"\n" if self._begins_line else b""
        data, self._held = before + self._held + data, b""
        if _MARK in data:
            n = len(data)
            data = _MARKS.sub(b"", data)
            self.changes["BOM"] += (n - len(data)) // len(_MARK)
        if not is_over and (found := _BEGUN_MARK.search(data[-len(_MARK) :])):
            # The rest may follow.
            self._held = found[0]
            data = data[: -len(self._held)]
        data = data[len(before) :]
        if data:
            self._begins_line = data.endswith(b"\n")
        return data


def normalized(blocks: Iterable[bytes], normalizer: Normalizer) -> Iterator[bytes]:
    """Yield a text in blocks as it is read; an empty block, for a pause, stays one."""
    for block in blocks:
        if (text := normalizer.push(block)) or not block:
            yield text
    if text := normalizer.flush():
        yield text


def normalized_prompt(text: str, vocab: "Vocab") -> tuple[str, Counter[str]]:
    """Return a prompt as the text is that a model was trained on, and what was changed.

    A vocabulary of characters with a CR is one of raw text: then the prompt stays as it is.
    """
    normalizer = Normalizer("the prompt")
    if vocab.kind == "chars" and not vocab.unknown("\r"):
        return text, normalizer.changes
    return normalizer.of_text(text), +normalizer.changes


def describe_changes(changes: Counter[str]) -> str:
    """Describe what was changed, with counts; empty if nothing was."""
    return ", ".join(how.format(changes[x]) for x, how in _DESCRIBED.items() if changes[x])
