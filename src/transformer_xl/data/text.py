"""Reading text in blocks, and dividing it into splits.

A split is a list of spans of files. At most a few blocks are in memory.
"""

import codecs
import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformer_xl.config import DataConfig
from transformer_xl.data.vocab import VocabKind
from transformer_xl.data.vocab_files import divided_as
from transformer_xl.errors import DataError

BLOCK_BYTES = 1 << 16
"""Bytes of a block; learning byte-pair units holds some hundred blocks."""

SPLITS = ("train", "valid", "test")

_LONGEST_INDENT = 256
# A text without any boundary is split anyway at this length.
_LONGEST_UNCUT = 64 * BLOCK_BYTES
# How far the end of a line is searched, in characters.
_LONGEST_LINE = 1 << 16
_LINE_STARTS = re.compile(r"\n[ \t]*(?=\S)")
_WORD_ENDS = re.compile(r"[^\W_](?= )")
_LINE_ENDS = re.compile(r"[^\W_](?=\n)")
_BLANK = re.compile(r"\s")


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

    @property
    def parts(self) -> dict[str, tuple[Path, ...]]:
        """The files of the splits that are given."""
        listed = {"train": self.train, "valid": self.valid, "test": self.test}
        return {name: paths for name, paths in listed.items() if paths is not None}

    def name(self, path: Path) -> str:
        """Return the path of a file, or of its source, relative to ``root``."""
        return Path(os.path.relpath(self.origins.get(path, path), self.root)).as_posix()


def read_bytes(span: Span) -> Iterator[bytes]:
    """Read a span in blocks."""
    with span.path.open("rb") as file:
        file.seek(span.start)
        left = len(span)
        while left > 0:
            block = file.read(min(BLOCK_BYTES, left))
            if not block:
                raise OSError(f"{span.path} became shorter while it was being read; try again")
            left -= len(block)
            yield block


def read_text(span: Span) -> Iterator[str]:
    """Read a span of UTF-8 text in blocks that end between characters."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    begin = read = span.start
    try:
        for block in itertools.chain(read_bytes(span), [b""]):
            text = decoder.decode(block, final=not block)
            read += len(block)
            # The decoder holds the bytes of an incomplete character.
            begin = read - len(decoder.getstate()[0])
            yield text
    except UnicodeDecodeError as error:
        raise DataError(
            f"{span.path} is not UTF-8 text: byte {begin + error.start:,} is "
            f"0x{error.object[error.start]:02x}. Convert the file to UTF-8, or read it byte by "
            "byte with --data.vocab bytes"
        ) from None


def read_blocks(kind: VocabKind, spans: Iterable[Span]) -> Iterator[str]:
    """Read spans of text in blocks whose ends no token crosses.

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
                # External tokenizers that read by line lose nothing there.
                cut = waiting.rfind("\n") + 1 or len(waiting)
            if cut:
                yield waiting[:cut]
                waiting = waiting[cut:]
        if kind in ("words", "integers") and line_is_open:
            waiting += "\n"
        if waiting:
            yield waiting


def split_point(kind: VocabKind, text: str) -> int:
    """Find the last position at which ``text`` can be split without changing its tokens.

    0 if there is none.
    """
    if kind == "imported":
        return 0  # Some rules look far ahead.
    if kind in ("bytes", "chars"):
        return len(text)
    if kind in ("words", "integers"):
        # The added mark makes a word of what follows the last blank, even of nothing.
        return len(text) + 1 - len(f"{text}.".rsplit(maxsplit=1)[-1])
    if kind == "brought":
        # Such tokenizers split after a word; a line end starts the next token or is dropped.
        found = list(_LINE_ENDS.finditer(text[-_LONGEST_LINE:]))
        return max(len(text) - _LONGEST_LINE, 0) + found[-1].end() if found else 0
    # Without a line, a unit also ends between a word and the space after it.
    for pattern in (_LINE_STARTS, _WORD_ENDS):
        if found := list(pattern.finditer(text)):
            return found[-1].end()
    return 0


def parts_of(spans: Iterable[Span], size: int) -> Iterator[list[Span]]:
    """Divide spans into parts of about ``size`` bytes that end where a line of text begins."""
    part: list[Span] = []
    left = size
    for span in spans:
        start = span.start
        while start < span.stop:
            stop = span.stop
            if stop - start > left:
                stop = line_start(span, start + left)
            part.append(Span(span.path, start, stop))
            left -= stop - start
            start = stop
            if left <= 0:
                yield part
                part, left = [], size
    if part:
        yield part


def line_start(span: Span, near: int) -> int:
    """Return the first byte from ``near`` on at which the text of a line begins, or the end.

    No byte-pair unit goes on there.
    """
    position, held = near, b""
    for block in read_bytes(Span(span.path, near, span.stop)):
        window = held + block
        # Beyond ASCII, the first character may be a blank, too, which is a unit of its own.
        if match := re.search(rb"\n[ \t]*(?=[!-~\xc2-\xf4])", window):
            return position - len(held) + match.end()
        # A match that may start there is found with the next block.
        held = window[-_LONGEST_INDENT:]
        position += len(block)
    return span.stop


def divide(config: DataConfig, files: TextFiles) -> dict[str, list[Span]]:
    """Assign spans of the files to splits."""
    whole = {
        name: [Span(path, 0, path.stat().st_size) for path in paths]
        for name, paths in files.parts.items()
    }
    valid_share = 0.0 if "valid" in whole else config.valid_fraction
    test_share = 0.0 if "test" in whole else config.test_fraction
    if config.split_by == "file":
        parts = _hold_out_files(whole["train"], files, valid_share, test_share)
    else:
        kind = divided_as(config)
        # External tokenizers are given whole lines.
        kind = "words" if kind == "brought" else kind
        parts = _cut_off_end(kind, whole["train"], valid_share, test_share)
    splits = dict(zip(SPLITS, parts, strict=True))
    splits |= {name: spans for name, spans in whole.items() if name != "train"}
    return {name: [span for span in part if len(span)] for name, part in splits.items()}


def _hold_out_files(
    spans: Sequence[Span], files: TextFiles, valid_share: float, test_share: float
) -> list[list[Span]]:
    """Hold out files until their fraction of the bytes is reached, in the order of a hash.

    The hash of the file name spreads them over the folders, and keeps most files in their split
    when others are added, changed or removed: only those at the boundaries of the splits move.
    """
    shares = [share for share in (test_share, valid_share) if share]
    if len(spans) <= len(shares):
        raise DataError(
            f"data.split_by=file needs more than {len(shares)} files to hold some out, and "
            f"there are {len(spans)}: use --data.split_by fraction or give data.valid_path "
            "and data.test_path"
        )

    def rank(span: Span) -> bytes:
        name = files.name(span.path)
        return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()

    total = sum(map(len, spans))
    queue = sorted(spans, key=rank, reverse=True)
    part_of: dict[Span, int] = {}
    for part, share in ((2, test_share), (1, valid_share)):
        n_bytes = 0
        while queue and n_bytes < share * total:
            n_bytes += len(queue[-1])
            part_of[queue.pop()] = part
    return [[x for x in spans if part_of.get(x, 0) == part] for part in range(3)]


def _cut_off_end(
    kind: VocabKind, spans: Sequence[Span], valid_share: float, test_share: float
) -> list[list[Span]]:
    held_out = valid_share + test_share
    if not held_out:
        return [list(spans), [], []]
    # In bytes, or in characters.
    lengths = [len(x) if kind == "bytes" else sum(map(len, read_text(x))) for x in spans]
    # Rounded, as 1 - 0.05 - 0.05 is below 0.9 in binary floating point.
    starts = [int(sum(lengths) * round(1 - share, 12)) for share in (held_out, test_share)]
    cuts = [0, *(_find(kind, spans, lengths, start) for start in starts), sum(map(len, spans))]
    return [_between(spans, begin, end) for begin, end in itertools.pairwise(cuts)]


def _find(kind: VocabKind, spans: Sequence[Span], lengths: Sequence[int], position: int) -> int:
    """Find the byte, counted over all files, at a position in bytes or characters."""
    index = 0
    while index < len(spans) and position >= lengths[index]:
        position -= lengths[index]
        index += 1
    before = sum(map(len, spans[:index]))
    if kind == "bytes" or position == 0:
        return before + position
    offset, word_end, left = spans[index].start, 0, _LONGEST_LINE
    for text in read_text(spans[index]):
        if position < len(text):
            if kind in ("chars", "bpe"):
                return before + offset + len(text[:position].encode())
            # Lines that are not too long stay whole, and words of others.
            if line_end := text.find("\n", position, position + left) + 1:
                return before + offset + len(text[:line_end].encode())
            if not word_end and (blank := _BLANK.search(text, position)):
                word_end = before + offset + len(text[: blank.end()].encode())
            left = max(left - (len(text) - position), 0)
            if word_end and not left:
                return word_end
            position = len(text)
        position -= len(text)
        offset += len(text.encode())
    return word_end or before + len(spans[index])


def _between(spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    found = []
    for span in spans:
        start, stop = max(begin, 0), min(end, len(span))
        if start < stop:
            found.append(Span(span.path, start, stop))
        begin, end = begin - len(span), end - len(span)
    return found
