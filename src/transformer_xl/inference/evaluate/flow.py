"""Scoring of a streamed text, with bounded buffers: at most a line and a segment."""

import codecs
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from transformer_xl.data import Vocab, split_point
from transformer_xl.inference.answers import losses
from transformer_xl.inference.evaluate.measuring import token_bytes_in
from transformer_xl.model import Reader

Unit = Literal["token", "line"]
Scored = tuple[int, float | None]
"""A token and its log-probability, in nats; None for the first token of the stream."""

LONGEST = 1 << 16
"""Maximum bytes of a line, or characters without a split point; longer ones are split anyway."""
# Of so many lines, those of similar lengths are read in batches.
_LINES_AT_ONCE = 256


class Piece(NamedTuple):
    """A part of a text that is tokenized separately."""

    text: str
    ids: list[int]
    ends_line: bool
    """Whether it ends with a line break."""
    unknown: Counter[str]
    """Characters or words outside the vocabulary: left out, or read as ``<unk>``."""
    line: int
    """Number of the line, from 1, in which it begins, or in which the first unknown symbol is."""


class Cutter:
    """Splits a stream of bytes into pieces and tokenizes them, independently of the blocks.

    By ``line``, each line is a piece. By ``token``, the tokens are those of the whole text: it is
    split where tokenization is final, and for imported vocabularies at line breaks.
    """

    def __init__(self, vocab: Vocab, by: Unit) -> None:
        self._vocab, self._by = vocab, by
        # The buffered input: bytes for lines, characters for tokens.
        self._bytes, self._text = b"", ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._n_lines = 0

    def push(self, block: bytes) -> Iterator[Piece]:
        """Add a block; yield the completed pieces."""
        return self._lines(block) if self._by == "line" else self._parts(block)

    def flush(self) -> Iterator[Piece]:
        """Yield the rest, at the end of the text."""
        cut = self._lines if self._by == "line" else self._parts
        return cut(b"", is_over=True)

    def _lines(self, block: bytes, *, is_over: bool = False) -> Iterator[Piece]:
        # The buffer is sliced once and not for each line.
        waiting, self._bytes, start = self._bytes + block, b"", 0
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

    def _parts(self, block: bytes, *, is_over: bool = False) -> Iterator[Piece]:
        self._text += self._decoder.decode(block, final=is_over)
        while self._text:
            text, kind = self._text[:LONGEST], self._vocab.kind
            if is_over and len(self._text) <= LONGEST:
                cut = len(text)
            elif kind == "imported":
                cut = text.rfind("\n") + 1
            else:
                cut = split_point(kind, text)
            if not cut and len(text) < LONGEST:
                return
            cut = cut or LONGEST
            self._text = self._text[cut:]
            yield self._piece(text[:cut], ends_line=False)

    def _piece(self, text: str, ends_line: bool) -> Piece:
        number = self._n_lines + 1
        self._n_lines += text.count("\n")
        ids, unknown = self._vocab.encode_known(text)
        if unknown:
            number += self._vocab.first_unknown_line(text) - 1
        return Piece(text, ids, ends_line, unknown, number)


class Flow:
    """Passes tokens to a reader: complete segments, or all available tokens if the input pauses."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._waiting: deque[int] = deque()
        # If results depend on the segmentation, an incomplete segment has to wait.
        self._may_read_early = not reader.model.depends_on_segments

    def scores(
        self,
        blocks: Iterable[bytes],
        cutter: Cutter,
        see: Callable[[Piece], object] = lambda piece: None,
    ) -> Iterator[list[Scored]]:
        """Yield tokens with their scores, in the groups in which they are computed.

        Args:
            blocks: The input; an empty block means that no more is available at the moment.
            cutter: Splits and tokenizes it.
            see: Called with each piece before its tokens are yielded.

        Raises:
            OSError: The input failed; raised after the scores of what was read.
        """
        failure = None
        try:
            for block in blocks:
                yield from self._segments(cutter.push(block), see)
                if not block:
                    yield from self._read(takes_all=self._may_read_early)
                    yield []
        except OSError as error:
            failure = error
        yield from self._segments(cutter.flush(), see)
        yield from self._read(takes_all=True)
        yield []
        if failure is not None:
            raise failure

    def _segments(
        self, pieces: Iterable[Piece], see: Callable[[Piece], object]
    ) -> Iterator[list[Scored]]:
        for piece in pieces:
            see(piece)
            self._add(piece.ids)
            yield from self._read(takes_all=False)

    def _add(self, ids: list[int]) -> None:
        self._waiting.extend(ids)

    def _read(self, *, takes_all: bool) -> Iterator[list[Scored]]:
        while self._waiting and (takes_all or len(self._waiting) >= self.reader.remaining):
            n = min(self.reader.remaining, len(self._waiting))
            tokens = [self._waiting.popleft() for _ in range(n)]
            yield list(zip(tokens, self.reader.read(tokens), strict=True))


class LineFlow(Flow):
    """Scores each piece as a text of its own, several at once, and yields them in their order."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader)
        self._may_read_early = True
        self._lines: deque[list[int]] = deque()

    def _add(self, ids: list[int]) -> None:
        self._lines.append(ids)

    def _read(self, *, takes_all: bool) -> Iterator[list[Scored]]:
        while self._lines and (takes_all or len(self._lines) >= _LINES_AT_ONCE):
            n = min(_LINES_AT_ONCE, len(self._lines))
            lines = [self._lines.popleft() for _ in range(n)]
            scores: list[list[float | None]] = [[None] * len(line[:1]) for line in lines]
            # A line of one token is predicted from nothing.
            longer = [n for n, line in enumerate(lines) if len(line) > 1]
            texts, lengths = [lines[n] for n in longer], self.reader.lengths
            found = (
                losses(self.reader.model, texts, lengths, batch_size=_BATCH_SIZE) if texts else []
            )
            for row, nll in zip(longer, found, strict=True):
                scores[row] += (-nll).tolist()
            for line, scores_of_line in zip(lines, scores, strict=True):
                yield list(zip(line, scores_of_line, strict=True))


@dataclass
class Sums:
    """Accumulated losses of a text or a line."""

    n_predicted: int = 0
    nll_sum: float = 0.0
    """Of -log p, in nats."""
    n_bytes: float | None = 0
    """None once the bytes of a token are unknown."""

    def add(self, log_prob: float | None, n_bytes: float) -> None:
        """Add a token with its bytes, 0 if unknown; a token without log-probability is ignored."""
        if log_prob is not None:
            self.n_predicted += 1
            self.nll_sum -= log_prob
            self.n_bytes = self.n_bytes + n_bytes if self.n_bytes is not None and n_bytes else None

    @property
    def nll(self) -> float | None:
        """Mean of -log p per token, in nats; None without tokens."""
        return self.nll_sum / self.n_predicted if self.n_predicted else None

    def figures(self) -> dict[str, float | None]:
        """Return the metrics by the names of the glossary; a mean of nothing is None."""
        n, bits = self.n_predicted, self.nll_sum / math.log(2)
        return {
            "tokens": n,
            "nll": self.nll,
            "nll_sum": self.nll_sum,
            "bits_per_token": bits / n if n else None,
            "bits_per_byte": bits / self.n_bytes if self.n_bytes else None,
        }


@dataclass
class _Line:
    number: int
    piece: Piece
    token_bytes: np.ndarray | None
    left: int
    sums: Sums = field(default_factory=Sums)


class LineSums:
    """Aggregates the scores of tokens by line."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._open: deque[_Line] = deque()
        self._number = 1
        self.n_lines, self.total = 0, Sums()

    def push(self, piece: Piece) -> None:
        """Add a line, before the scores of its tokens."""
        n_bytes = len(piece.text.encode("utf-8", "surrogateescape"))
        token_bytes = token_bytes_in(self._vocab, piece.ids, n_bytes)
        self._open.append(_Line(self._number, piece, token_bytes, len(piece.ids)))
        self._number += piece.ends_line

    def add(self, scored: Iterable[Scored]) -> Iterator[dict[str, Any]]:
        """Add the scores of the next tokens; yield the completed lines."""
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
            text = line.piece.text.removesuffix("\n")
            yield {
                "line": line.number,
                # JSON cannot hold invalid UTF-8.
                "text": text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
                **line.sums.figures(),
                "unknown": line.piece.unknown.total(),
            }


def _character_end(data: bytes, start: int, stop: int) -> int:
    """Return the last boundary of a UTF-8 character up to ``stop``."""
    for place in range(stop, max(stop - 4, start), -1):
        if data[place] & 0xC0 != 0x80:
            return place
    return stop
