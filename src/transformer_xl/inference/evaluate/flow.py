"""A text scored as it arrives: cut where nothing can change any more, read as far as it is there.

Nothing here grows with the text: what waits is at most a line or a segment.
"""

import codecs
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from transformer_xl.data import Vocab
from transformer_xl.data.text import split_point
from transformer_xl.inference.evaluate.measuring import token_bytes_in
from transformer_xl.model.reading import Reader

Unit = Literal["token", "line"]
Scored = tuple[int, float | None]
"""A token and its log-probability, in nats; None for the first one of all."""

LONGEST = 1 << 16
"""Bytes of a line, or characters without a place to cut, after which there is a cut anyway."""


class Piece(NamedTuple):
    """A part of a text that is cut into tokens by itself."""

    text: str
    ids: list[int]
    ends_line: bool
    """Whether a line ends with it."""
    unknown: Counter[str]
    """What has no symbol of its own: left out, or read as ``<unk>``."""
    line: int
    """In which line of the text it begins, or what is unknown, from 1."""


class Cutter:
    """Cuts bytes into pieces, the same ones for the tokens however the bytes arrive.

    By ``line``, each line is a piece. By ``token``, the tokens are those of the whole text: it is
    cut where they cannot change any more, and for imported vocabularies where lines end.
    """

    def __init__(self, vocab: Vocab, by: Unit) -> None:
        self._vocab, self._by = vocab, by
        # What waits, as bytes for lines and as characters for tokens.
        self._bytes, self._text = b"", ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._n_lines = 0

    def push(self, block: bytes) -> Iterator[Piece]:
        """Take what has arrived; yield the pieces that it completes."""
        if self._by == "line":
            self._bytes += block
            yield from self._lines(is_over=False)
        else:
            self._text += self._decoder.decode(block)
            yield from self._parts(is_over=False)

    def flush(self) -> Iterator[Piece]:
        """Yield what is left at the end of the text."""
        if self._by == "line":
            yield from self._lines(is_over=True)
        else:
            self._text += self._decoder.decode(b"", final=True)
            yield from self._parts(is_over=True)

    def _lines(self, *, is_over: bool) -> Iterator[Piece]:
        start = 0
        # Taken out as a whole: lines are many, and what waits is cut once.
        waiting, self._bytes = self._bytes, b""
        while start < len(waiting):
            stop = waiting.find(b"\n", start, start + LONGEST) + 1
            ends_line = stop > 0
            if not ends_line:
                if len(waiting) - start > LONGEST:
                    stop = _character_end(waiting, start, start + LONGEST)
                elif is_over:
                    stop = len(waiting)
                else:
                    break
            yield self._piece(waiting[start:stop].decode("utf-8", "surrogateescape"), ends_line)
            start = stop
        self._bytes = waiting[start:]

    def _parts(self, *, is_over: bool) -> Iterator[Piece]:
        while self._text:
            if is_over and len(self._text) <= LONGEST:
                cut = len(self._text)
            else:
                cut = self._cut(self._text[:LONGEST])
                if not cut and len(self._text) >= LONGEST:
                    cut = LONGEST
            if not cut:
                return
            part, self._text = self._text[:cut], self._text[cut:]
            yield self._piece(part, ends_line=False)

    def _cut(self, text: str) -> int:
        kind = self._vocab.kind
        return text.rfind("\n") + 1 if kind == "imported" else split_point(kind, text)

    def _piece(self, text: str, ends_line: bool) -> Piece:
        number = self._n_lines + 1
        self._n_lines += text.count("\n")
        ids, unknown = self._vocab.encode_known(text)
        if unknown:
            number += self._vocab.first_unknown_line(text) - 1
        return Piece(text, ids, ends_line, unknown, number)


class Flow:
    """Hands tokens to a reader: whole segments while more has arrived, else all that is there."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._waiting: deque[int] = deque()

    def scores(
        self,
        blocks: Iterable[bytes],
        cutter: Cutter,
        see: Callable[[Piece], object] = lambda piece: None,
    ) -> Iterator[list[Scored]]:
        """Yield tokens with their scores, those that are read at once together.

        Args:
            blocks: What arrives; an empty one says that nothing more is there at the moment.
            cutter: What cuts it into pieces.
            see: Called with each piece before its tokens come.

        Raises:
            OSError: No more can be read; what was, comes first.
        """
        failure = None
        try:
            for block in blocks:
                for piece in cutter.push(block):
                    see(piece)
                    yield from self._read(piece.ids, takes_all=False)
                if not block:
                    # Where it matters how much is read at once, an unfinished segment has to wait.
                    yield from self._read([], takes_all=not self.reader.model.depends_on_segments)
                    yield []
        except OSError as error:
            failure = error
        for piece in cutter.flush():
            see(piece)
            yield from self._read(piece.ids, takes_all=False)
        yield from self._read([], takes_all=True)
        yield []
        if failure is not None:
            raise failure

    def _read(self, ids: list[int], *, takes_all: bool) -> Iterator[list[Scored]]:
        self._waiting.extend(ids)
        while self._waiting and (takes_all or len(self._waiting) >= self.reader.room):
            n = min(self.reader.room, len(self._waiting))
            tokens = [self._waiting.popleft() for _ in range(n)]
            yield list(zip(tokens, self.reader.read(tokens), strict=True))


@dataclass
class Sums:
    """What was predicted of a text, or of a line, in sums."""

    n_predicted: int = 0
    nll_sum: float = 0.0
    """Of -log p, in nats."""
    n_bytes: float | None = 0
    """None as soon as those of one token are not known."""

    def add(self, log_prob: float | None, n_bytes: float) -> None:
        """Add a token with its bytes, 0 if not known; the first one of all is not predicted."""
        if log_prob is not None:
            self.n_predicted += 1
            self.nll_sum -= log_prob
            self.n_bytes = self.n_bytes + n_bytes if self.n_bytes is not None and n_bytes else None

    @property
    def nll(self) -> float | None:
        """The mean surprise of a token, in nats; None without any."""
        return self.nll_sum / self.n_predicted if self.n_predicted else None

    @property
    def bits_per_token(self) -> float | None:
        """The mean surprise of a token, in bits; None without any."""
        return self.nll_sum / math.log(2) / self.n_predicted if self.n_predicted else None

    @property
    def bits_per_byte(self) -> float | None:
        """The mean surprise of a byte; None without any that is known."""
        return self.nll_sum / math.log(2) / self.n_bytes if self.n_bytes else None

    def figures(self) -> dict[str, float | None]:
        """Return what people compare, under the names that it has everywhere."""
        return {
            "tokens": self.n_predicted,
            "nll": self.nll,
            "nll_sum": self.nll_sum,
            "bits_per_token": self.bits_per_token,
            "bits_per_byte": self.bits_per_byte,
        }


@dataclass
class _Line:
    text: str
    number: int
    left: int
    token_bytes: np.ndarray | None
    n_unknown: int
    sums: Sums = field(default_factory=Sums)


class LineSums:
    """Puts the scores of tokens together to those of their lines."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._open: deque[_Line] = deque()
        self._number = 1
        self.n_lines, self.total = 0, Sums()

    def push(self, piece: Piece) -> None:
        """Take a line whose tokens are going to be scored."""
        n_bytes = len(piece.text.encode("utf-8", "surrogateescape"))
        token_bytes = token_bytes_in(self._vocab, piece.ids, n_bytes)
        n_unknown = piece.unknown.total()
        line = _Line(piece.text, self._number, len(piece.ids), token_bytes, n_unknown)
        self._open.append(line)
        self._number += piece.ends_line

    def add(self, scored: Iterable[Scored]) -> Iterator[dict[str, Any]]:
        """Take the next tokens with their scores; yield the lines that they complete."""
        for token, log_prob in scored:
            yield from self._completed()
            line = self._open[0]
            n_bytes = 0 if line.token_bytes is None else line.token_bytes[token].item()
            for sums in (line.sums, self.total):
                sums.add(log_prob, n_bytes)
            line.left -= 1
        yield from self._completed()

    def _completed(self) -> Iterator[dict[str, Any]]:
        while self._open and not self._open[0].left:
            line = self._open.popleft()
            self.n_lines += 1
            text = line.text.removesuffix("\n")
            yield {
                "line": line.number,
                # Bytes that are no text have no place in JSON.
                "text": text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
                **line.sums.figures(),
                "unknown": line.n_unknown,
            }


def _character_end(data: bytes, start: int, stop: int) -> int:
    """Return the last place up to ``stop`` where a character of UTF-8 may end."""
    for place in range(stop, max(stop - 4, start), -1):
        if data[place] & 0xC0 != 0x80:
            return place
    return stop
