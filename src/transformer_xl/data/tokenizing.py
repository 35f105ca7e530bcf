"""Writing the tokens of a split."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from transformer_xl.config import Say, replace_file
from transformer_xl.data.corpus import SplitFile, write_tokens
from transformer_xl.data.imported import ImportedVocab
from transformer_xl.data.text import Span, read_blocks, read_bytes, read_text
from transformer_xl.data.vocab import Vocab
from transformer_xl.errors import DataError

_SECONDS_BETWEEN_LINES = 10.0
_LEFT_OUT = -1
"""In place of the ID of a line break in a vocabulary of bytes that has none: it is left out."""
_MISSING = -2
"""In place of the ID of any other byte that a vocabulary has no symbol for: an error."""
# Where a text of characters can be split for vocabularies with rules of their own for blanks.
_WITHIN_A_WORD = re.compile(r"[!-~](?=[!-~])")


class WrittenSplit(SplitFile, kw_only=True):
    """The tokens of a split, and how many characters became ``<unk>``."""

    unknown: int


def write_split(
    path: Path,
    vocab: Vocab,
    spans: Sequence[Span],
    say: Say,
    *,
    is_prepared: bool = False,
    n_threads: int = 1,
) -> WrittenSplit:
    """Write the tokens of a text, 16 or 32 bits each, and their ``NAME.json``, unless it is there.

    Args:
        path: The file.
        vocab: The vocabulary.
        spans: The text.
        say: Called with lines about the progress.
        is_prepared: Whether the text is split at spaces alone, as published corpora are.
        n_threads: Threads that tokenize with byte-pair units or a tokenizer of Hugging Face.

    Returns:
        What was written.

    Raises:
        DataError: The text is not UTF-8, or has symbols that the vocabulary lacks.
        OSError: A file cannot be read or written.
    """
    note = path.with_suffix(".json")
    if note.is_file():
        return msgspec.json.decode(note.read_bytes(), type=WrittenSplit)
    # In texts of words, <unk> may be an ordinary word.
    unk_id = vocab.unk_id if vocab.kind == "chars" else None
    encode = partial(_encode, vocab, is_prepared=is_prepared)
    n_unknown = 0

    def pieces() -> Iterator[np.ndarray]:
        nonlocal n_unknown
        n_tokens, said = 0, time.monotonic()
        for span in spans:
            try:
                for tokens in _encode_blocks(encode, _read_blocks(vocab, span), n_threads):
                    yield tokens
                    n_tokens += len(tokens)
                    n_unknown += 0 if unk_id is None else int(np.count_nonzero(tokens == unk_id))
                    if (now := time.monotonic()) - said > _SECONDS_BETWEEN_LINES:
                        said = now
                        say(f"{path.stem}: {n_tokens:,} tokens so far")
            except ValueError as error:
                raise _add_place(error, vocab, span) from error

    about = write_tokens(path, vocab, pieces())
    written = WrittenSplit(**about, bytes=sum(map(len, spans)), unknown=n_unknown)
    replace_file(note, msgspec.json.encode(written))
    return written


def _encode_blocks(
    encode: Callable[[str | bytes], np.ndarray], blocks: Iterable[str | bytes], n_threads: int
) -> Iterator[np.ndarray]:
    """Yield the tokens of each block, in order; some blocks are encoded ahead, in threads."""
    blocks = iter(blocks)
    with ThreadPoolExecutor(n_threads) as pool:
        while group := [*islice(blocks, 4 * n_threads)]:
            yield from pool.map(encode, group)


def _has_bytes(vocab: Vocab) -> bool:
    """Whether each token is a byte."""
    is_imported = isinstance(vocab, ImportedVocab) and vocab.rules.join == "bytes"
    return vocab.kind == "bytes" or is_imported


def _read_blocks(vocab: Vocab, span: Span) -> Iterable[str | bytes]:
    """Return a span in blocks whose ends no token crosses."""
    if _has_bytes(vocab):
        return read_bytes(span)
    if isinstance(vocab, ImportedVocab):
        return _read_lines(vocab, span)
    return read_blocks(vocab.kind, [span])


def _read_lines(vocab: ImportedVocab, span: Span) -> Iterator[str]:
    """Read text in blocks of whole lines, or in parts of words if lines have no end."""
    waiting = ""
    for text in read_text(span):
        waiting += text
        cut = waiting.rfind("\n") + 1
        if not cut and vocab.rules.join == "chars" and vocab.eos_id is None:
            cut = max((x.end() for x in _WITHIN_A_WORD.finditer(waiting)), default=0)
        yield waiting[:cut]
        waiting = waiting[cut:]
    # A last line without a line end gets one.
    yield waiting + ("\n" if waiting.strip() and vocab.eos_id is not None else "")


def _encode(vocab: Vocab, block: str | bytes, *, is_prepared: bool) -> np.ndarray:
    """Return the tokens of a block: a text, or bytes for a vocabulary of bytes.

    Raises:
        InputError: A text has symbols that the vocabulary lacks.
        DataError: There are bytes that the vocabulary has no symbol for.
    """
    if isinstance(block, str):
        return vocab.encode_array(block, prepared=is_prepared)
    tokens = _byte_ids(vocab)[np.frombuffer(block, dtype=np.uint8)]
    if (tokens == _MISSING).any():
        raise DataError("it holds bytes that the vocabulary has no symbol for")
    return tokens[tokens >= 0]


@lru_cache(maxsize=1)
def _byte_ids(vocab: Vocab) -> np.ndarray:
    """Return the IDs of the 256 bytes in a vocabulary of bytes.

    Returns:
        An array of shape (256,); :data:`_LEFT_OUT` or :data:`_MISSING` where a byte has no ID.
    """
    ids = np.full(256, _MISSING, dtype=np.int64)
    # Replaced below if the vocabulary has a line break.
    ids[ord("\n")] = _LEFT_OUT
    for token in range(len(vocab)):
        symbol = vocab.decode_bytes([token])
        # Symbols that were added to the bytes do not occur in texts.
        if len(symbol) == 1:
            ids[symbol[0]] = token
    return ids


def _add_place(error: ValueError, vocab: Vocab, span: Span) -> ValueError:
    """Return an error about a text as one that names the file, and the line if a symbol is unknown.

    Args:
        error: The error.
        vocab: The vocabulary.
        span: The text.

    Returns:
        A DataError, or the error itself if it names the file already.
    """
    if _has_bytes(vocab) or (place := find_unknown(vocab, [span])) is None:
        is_named = str(span.path) in str(error)
        return error if is_named else DataError(f"{span.path}: {error}")
    path, line, unknown = place
    return DataError(f"{path}: {vocab.unknown_error(unknown, line)}")


def find_unknown(vocab: Vocab, spans: Iterable[Span]) -> tuple[Path, int, Counter[str]] | None:
    """Return the unknown symbols of the first span that has any.

    Args:
        vocab: The vocabulary.
        spans: The text.

    Returns:
        The file, the line of its first unknown symbol, from 1, and the number of each such symbol;
        None if all symbols are known.
    """
    for span in spans:
        line, first, unknown = 1, 0, Counter[str]()
        for block in read_bytes(Span(span.path, 0, span.start)):
            line += block.count(b"\n")
        for text in read_blocks(vocab.kind, [span]):
            symbols = vocab.unknown(text)
            if symbols and not first:
                first = line + vocab.first_unknown_line(text) - 1
            line += text.count("\n")
            unknown.update(symbols)
        if unknown:
            return span.path, first, unknown
    return None
