"""Text as it passes from files to symbols: read in blocks, divided into splits.

A split is a list of spans of files. Nothing here holds more than a few blocks in memory.
"""

import codecs
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from transformer_xl.config import DataConfig
from transformer_xl.data.store import StoredObject
from transformer_xl.data.vocab import VocabKind
from transformer_xl.data.vocab_files import divided_as

BLOCK_BYTES = 1 << 16
"""How much of a file is read at once; learning byte-pair units holds some hundred blocks."""

SPLITS = ("train", "valid", "test")

_LONGEST_INDENT = 256
# A text without a single place to cut it is cut anyway when this much of it is waiting.
_LONGEST_UNCUT = 64 * BLOCK_BYTES
# Where the end of a line is looked for.
_TAIL = 1 << 16
_LINE_STARTS = re.compile(r"\n[ \t]*(?=\S)")


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``start`` to ``stop`` of a file."""

    path: Path
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFiles:
    """The files of a corpus, in reading order; ``valid`` and ``test`` None: split them off."""

    root: Path
    description: str
    train: tuple[Path, ...]
    valid: tuple[Path, ...] | None = None
    test: tuple[Path, ...] | None = None
    origins: Mapping[Path, Path] = field(default_factory=dict)
    """For files that were unpacked: the files they came from."""
    stored: Mapping[Path, StoredObject] = field(default_factory=dict)
    """For files of a store, which are fetched when the corpus is built: the objects."""

    def name(self, path: Path) -> str:
        """Return the place of a file, or of what it came from, below ``root``."""
        path = self.origins.get(path, path)
        if path in self.stored:
            return self.stored[path].name
        return Path(os.path.relpath(path, self.root)).as_posix()


def read_bytes(span: Span) -> Iterator[bytes]:
    """Read a span in blocks."""
    with span.path.open("rb") as file:
        file.seek(span.start)
        left = len(span)
        while left > 0:
            block = file.read(min(BLOCK_BYTES, left))
            if not block:
                raise OSError(f"{span.path} became shorter while it was read; try again")
            left -= len(block)
            yield block


def read_text(span: Span) -> Iterator[str]:
    """Read a span of UTF-8 text in blocks that end between characters.

    Raises:
        ValueError: The bytes are no UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = begin = span.start
    try:
        for block in read_bytes(span):
            # Bytes of an unfinished character wait in the decoder, in front of this block.
            begin = position - len(decoder.getstate()[0])
            text = decoder.decode(block)
            position += len(block)
            yield text
        begin = position - len(decoder.getstate()[0])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{span.path} is no UTF-8 text: byte {begin + error.start:,} is "
            f"0x{error.object[error.start]:02x}. Convert the file to UTF-8, or read it byte by "
            "byte with --data.vocab bytes"
        ) from None


def read_blocks(kind: VocabKind, spans: Iterable[Span]) -> Iterator[str]:
    """Read spans of text in blocks that no symbol crosses.

    For words, a last line without a line end gets one, so that ``<eos>`` ends every line.
    """
    for span in spans:
        waiting, line_is_open = "", False
        for text in read_text(span):
            *lines, last = text.rsplit("\n", 1)
            line_is_open = (line_is_open and not lines) or bool(last.strip())
            waiting += text
            cut = split_point(kind, waiting)
            if cut == 0 and len(waiting) > _LONGEST_UNCUT:
                cut = len(waiting)
            if cut:
                yield waiting[:cut]
                waiting = waiting[cut:]
        if kind in ("words", "integers") and line_is_open:
            waiting += "\n"
        if waiting:
            yield waiting


def split_point(kind: VocabKind, text: str) -> int:
    """Find the last place where ``text`` may be cut in two without changing its symbols.

    0 when there is none.
    """
    if kind == "imported":
        return 0  # Some of their rules look far ahead.
    if kind in ("bytes", "chars"):
        return len(text)
    if kind in ("words", "integers"):
        return max(text.rfind("\n"), text.rfind(" ")) + 1
    if kind == "brought":
        # Such tokenizers divide behind a word, and a line end begins what follows, or is dropped.
        found = list(re.finditer(r"(?<=[A-Za-z0-9])\n", text[-_TAIL:]))
        return max(len(text) - _TAIL, 0) + found[-1].start() if found else 0
    end = len(text)
    while (newline := text.rfind("\n", 0, end)) >= 0:
        if start := _LINE_STARTS.match(text, newline):
            return start.end()
        end = newline
    # No line to begin: a unit also ends between a word and the space after it.
    end = len(text)
    while (space := text.rfind(" ", 1, end)) > 0:
        if text[space - 1].isascii() and text[space - 1].isalnum():
            return space
        end = space
    return 0


def find_cut(kind: VocabKind | Literal["authors-bytes"], span: Span, near: int) -> int:
    """Return the first byte from ``near`` on at which a span may be cut in two.

    Both parts, cut into symbols by themselves, give what the whole gives. The end of the span
    when there is no such place.
    """
    if kind in ("bytes", "authors-bytes"):
        return min(near, span.stop)
    patterns = {
        "chars": rb"[\x00-\x7f\xc0-\xff]",
        # A unit ends before the first visible character of a line.
        "bpe": rb"\n[ \t]*(?=[!-~])",
        "brought": rb"[A-Za-z0-9](?=\n)",
        # Within a word: what some of them do with blanks depends on what stands around them.
        "imported": rb"[!-~](?=[!-~])",
    }
    pattern = re.compile(patterns.get(kind, rb"\n"))
    position, held = near, b""
    for block in read_bytes(Span(span.path, near, span.stop)):
        window = held + block
        if found := pattern.search(window):
            return position - len(held) + (found.start() if kind == "chars" else found.end())
        # What might begin there comes once more with the next block.
        held = window[-_LONGEST_INDENT:]
        position += len(block)
    return span.stop


def divide(config: DataConfig, files: TextFiles) -> dict[str, list[Span]]:
    """Decide which spans of the files belong to which split.

    Raises:
        ValueError: There are too few files to hold whole ones out, or the text is no UTF-8.
    """
    valid_share = config.valid_fraction if files.valid is None else 0.0
    test_share = config.test_fraction if files.test is None else 0.0
    spans = [_whole(path) for path in files.train]
    if config.split_by == "file":
        parts = _hold_out_files(spans, files, valid_share, test_share)
    else:
        kind: VocabKind = "bytes" if config.vocab == "authors-bytes" else config.vocab
        if config.tokenizer:
            kind = divided_as(config.tokenizer)
            # A tokenizer of somebody's own is given whole lines.
            kind = "words" if kind == "brought" else kind
        parts = _cut_off_end(kind, spans, valid_share, test_share)
    splits: dict[str, list[Span]] = dict(zip(SPLITS, parts, strict=True))
    for name, paths in (("valid", files.valid), ("test", files.test)):
        if paths is not None:
            splits[name] = [_whole(path) for path in paths]
    return {name: [span for span in part if len(span)] for name, part in splits.items()}


def _whole(path: Path) -> Span:
    return Span(path, 0, path.stat().st_size)


def _hold_out_files(
    spans: Sequence[Span], files: TextFiles, valid_share: float, test_share: float
) -> tuple[list[Span], list[Span], list[Span]]:
    """Hold out files until their share of the bytes is reached, in the order of a hash.

    The hash of a file's name spreads them over the folders, and keeps a file where it is when
    other files change or come and go.
    """
    shares = [share for share in (test_share, valid_share) if share]
    if len(spans) <= len(shares):
        raise ValueError(
            f"data.split_by=file needs more than {len(shares)} files to hold some out, and "
            f"there are {len(spans)}: use --data.split_by fraction or give data.valid_path "
            "and data.test_path"
        )

    def rank(span: Span) -> bytes:
        name = files.name(span.path)
        return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()

    total = sum(map(len, spans))
    queue = sorted(spans, key=rank, reverse=True)
    held_out: list[set[Span]] = []
    for share in (test_share, valid_share):
        taken: set[Span] = set()
        n_bytes = 0
        while queue and n_bytes < share * total:
            n_bytes += len(queue[-1])
            taken.add(queue.pop())
        held_out.append(taken)
    test, valid = held_out
    return (
        [span for span in spans if span not in valid | test],
        [span for span in spans if span in valid],
        [span for span in spans if span in test],
    )


def _cut_off_end(
    kind: VocabKind, spans: Sequence[Span], valid_share: float, test_share: float
) -> tuple[list[Span], list[Span], list[Span]]:
    if not valid_share + test_share:
        return list(spans), [], []
    lengths = [len(span) if kind == "bytes" else _count_characters(span) for span in spans]
    # Shares like 0.1 are no binary fractions: without rounding, 1 - 0.05 - 0.05 is below 0.9.
    starts = [
        int(sum(lengths) * round(1 - share, 12)) for share in (valid_share + test_share, test_share)
    ]
    first, second = (_find(kind, spans, lengths, start) for start in starts)
    return (
        _between(spans, (0, 0), first),
        _between(spans, first, second),
        _between(spans, second, (len(spans), 0)),
    )


def _find(
    kind: VocabKind, spans: Sequence[Span], lengths: Sequence[int], position: int
) -> tuple[int, int]:
    """Find the file, and the byte in it, at a position counted in bytes or characters."""
    index = 0
    while index < len(spans) and position >= lengths[index]:
        position -= lengths[index]
        index += 1
    if kind == "bytes" or position == 0:
        return index, position
    span = spans[index]
    offset, position = _skip_characters(span, position)
    for text in read_text(Span(span.path, offset, span.stop)):
        if position < len(text):
            if kind in ("chars", "bpe"):
                return index, offset + len(text[:position].encode())
            # Words stay whole, and lines where they are not endless.
            if end := re.compile("\n").search(text, position) or re.compile(r"\s").search(
                text, position
            ):
                return index, offset + len(text[: end.end()].encode())
            position = len(text)
        position -= len(text)
        offset += len(text.encode())
    return index + 1, 0


def _starts_of_characters(block: bytes) -> np.ndarray:
    """Mark the bytes of UTF-8 text that begin a character."""
    return (np.frombuffer(block, dtype=np.uint8) & 0xC0) != 0x80


def _count_characters(span: Span) -> int:
    return sum(int(np.count_nonzero(_starts_of_characters(block))) for block in read_bytes(span))


def _skip_characters(span: Span, n: int) -> tuple[int, int]:
    """Return a byte at which a character begins, and how many of ``n`` are then still to come.

    Whole blocks are passed over without being decoded.
    """
    offset = span.start
    for block in read_bytes(span):
        starts = _starts_of_characters(block)
        in_block = int(np.count_nonzero(starts))
        if in_block > n:
            first = int(np.argmax(starts))
            # What comes before belongs to the last character of the block before.
            return offset + first, n
        n -= in_block
        offset += len(block)
    return span.stop, n


def _between(spans: Sequence[Span], begin: tuple[int, int], end: tuple[int, int]) -> list[Span]:
    found = []
    for index, span in enumerate(spans[: end[0] + 1]):
        start = begin[1] if index == begin[0] else 0
        stop = end[1] if index == end[0] else len(span)
        if index >= begin[0] and start < stop:
            found.append(Span(span.path, start, stop))
    return found
