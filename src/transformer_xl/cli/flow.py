"""Scoring of a streamed text, with bounded buffers: at most a line and a segment."""

import codecs
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np

from transformer_xl.data import Vocab, split_point
from transformer_xl.inference.evaluate import bytes_of, token_bytes_in
from transformer_xl.model import Reader

Unit = Literal["token", "line"]

LONGEST = 1 << 16
"""Maximum characters of a piece; a line, or a text without a split point, is split there."""


class Piece(NamedTuple):
    """A part of a text that is tokenized separately."""

    text: str
    ids: list[int]
    line: int
    """Number of the line, from 1, in which it begins."""
    unknown: Counter[str]
    """Characters or words outside the vocabulary: left out, or read as ``<unk>``."""


Scored = tuple[Piece, list[float | None]]
"""A piece and the log-probabilities of its tokens, in nats; None for the first of a text."""


def pieces_of(vocab: Vocab, blocks: Iterable[bytes], by: Unit) -> Iterator[Piece | None]:
    """Split a stream of bytes into pieces and tokenize them, independently of the blocks.

    By ``line``, each line is a piece. By ``token``, the tokens are those of the whole text: it is
    split where tokenization is final, and for imported vocabularies at line breaks.

    Args:
        vocab: The vocabulary.
        blocks: The input; an empty block means that no more is available at the moment.
        by: How the text is split.

    Returns:
        The pieces, and None where no more input is available.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    waiting, line = "", 1
    for block in chain(blocks, [None]):
        waiting += decoder.decode(block or b"", final=block is None)
        *texts, waiting = _split(vocab, waiting, by)
        for text in texts if block is not None else [*texts, *[waiting] * bool(waiting)]:
            ids, unknown = vocab.encode_known(text)
            yield Piece(text, ids, line, unknown)
            line += text.count("\n")
        if block == b"":
            yield None


def _split(vocab: Vocab, text: str, by: Unit) -> Iterator[str]:
    """Split the beginning of a text; yield its pieces, and last what has to wait for more."""
    start = 0
    while start < len(text):
        stop = start + LONGEST
        if by == "line":
            end = text.find("\n", start, stop) + 1
        elif vocab.kind == "imported":
            end = text.rfind("\n", start, stop) + 1
        else:
            end = start + split_point(vocab.kind, text[start:stop])
        if end <= start:
            if len(text) < stop:
                break
            end = stop
        yield text[start:end]
        start = end
    yield text[start:]


def scores(reader: Reader, pieces: Iterable[Piece | None]) -> Iterator[Scored]:
    """Score the pieces of one text, each as soon as its tokens are read.

    Tokens are read in complete segments, or all that are available where the input pauses.
    """
    unread, log_probs, waiting = deque[int](), deque[float | None](), deque[Piece]()
    # If results depend on the segmentation, an incomplete segment has to wait.
    reads_early = not reader.model.depends_on_segments
    for piece, is_over in chain(((x, False) for x in pieces), [(None, True)]):
        if piece is not None:
            waiting.append(piece)
            unread.extend(piece.ids)
        takes_all = is_over or (piece is None and reads_early)
        while unread and (takes_all or len(unread) >= reader.remaining):
            n = min(reader.remaining, len(unread))
            log_probs.extend(reader.read([unread.popleft() for _ in range(n)]))
        while waiting and len(waiting[0].ids) <= len(log_probs):
            ready = waiting.popleft()
            yield ready, [log_probs.popleft() for _ in ready.ids]


@dataclass(frozen=True)
class Sums:
    """Accumulated losses of a line or a text."""

    n_tokens: int = 0
    """Tokens with and without a log-probability."""
    n_predicted: int = 0
    nll_sum: float = 0.0
    """Of -log p, in nats."""
    n_bytes: float | None = 0
    """Bytes of the predicted tokens; None if those of one are unknown."""

    @classmethod
    def of(cls, vocab: Vocab, piece: Piece, log_probs: Sequence[float | None]) -> "Sums":
        """Return the sums of a piece."""
        n_bytes = len(piece.text.encode("utf-8", "surrogateescape"))
        sizes = token_bytes_in(vocab, piece.ids, n_bytes)
        pairs = zip(piece.ids, log_probs, strict=True)
        known = [(token, log_prob) for token, log_prob in pairs if log_prob is not None]
        tokens = np.array([token for token, _ in known], np.int64)
        nll_sum = sum((-log_prob for _, log_prob in known), 0.0)
        return cls(len(log_probs), len(known), nll_sum, bytes_of(sizes, tokens))

    def __add__(self, other: "Sums") -> "Sums":
        known = None not in (self.n_bytes, other.n_bytes)
        return Sums(
            self.n_tokens + other.n_tokens,
            self.n_predicted + other.n_predicted,
            self.nll_sum + other.nll_sum,
            (self.n_bytes or 0) + (other.n_bytes or 0) if known else None,
        )

    def figures(self) -> dict[str, float | None]:
        """Return the metrics by the names of the glossary; a mean of nothing is None."""
        n, bits = self.n_predicted, self.nll_sum / math.log(2)
        return {
            "tokens": n,
            "nll": self.nll_sum / n if n else None,
            "nll_sum": self.nll_sum,
            "bits_per_token": bits / n if n else None,
            "bits_per_byte": bits / self.n_bytes if self.n_bytes else None,
        }
