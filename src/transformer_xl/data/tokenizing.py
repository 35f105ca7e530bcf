"""Writing the tokens of a split, so that a killed process goes on where it was."""

import json
import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_xl.config import Say, checksum, replace_file
from transformer_xl.data.corpus import token_dtype
from transformer_xl.data.imported import ImportedVocab
from transformer_xl.data.text import Span, read_blocks, read_bytes, read_text
from transformer_xl.data.vocab import Vocab
from transformer_xl.errors import DataError

NOTED_BYTES = 64 << 20
"""Bytes of text after which the position is recorded."""
_SECONDS_BETWEEN_LINES = 10.0
# Bytes without an ID: omitted ones, and those that are an error.
_LEFT_OUT, _MISSING = -1, -2
# Where a text of characters can be split for vocabularies with rules of their own for blanks.
_WITHIN_A_WORD = re.compile(r"[!-~](?=[!-~])")


class _Block(NamedTuple):
    """A piece of a text whose ends no token crosses."""

    content: str | bytes
    span: int
    """Index of the span that it is of."""
    stop: int
    """Where it ends in the file."""


def write_split(
    path: Path,
    vocab: Vocab,
    spans: Sequence[Span],
    say: Say,
    *,
    is_prepared: bool = False,
    n_threads: int = 1,
) -> dict[str, Any]:
    """Write the tokens of a text, 16 or 32 bits each, unless they are there.

    The tokens are appended to a temporary file. Beside it, ``NAME.json`` records how far it is: a
    process that was killed goes on from there, and the bytes are the same.

    Args:
        path: The file.
        vocab: The vocabulary.
        spans: The text.
        say: Called with lines about the progress.
        is_prepared: Whether the text is split at spaces alone, as published corpora are.
        n_threads: Threads that tokenize with byte-pair units or a tokenizer of Hugging Face.

    Returns:
        The entry of the manifest: ``file``, ``tokens``, ``bytes``, ``sha256``, and ``unknown``,
        the number of characters that became ``<unk>``.

    Raises:
        DataError: The text is not UTF-8, or has symbols that the vocabulary lacks.
        OSError: A file cannot be read or written.
    """
    dtype, note = token_dtype(vocab), path.with_suffix(".json")
    temporary = path.with_name(f".{path.name}.part")
    state = _read_note(note, temporary, dtype.itemsize)
    if "sha256" in state:
        return state
    *before, total = accumulate(map(len, spans), initial=0)
    first = before[state["span"]] + state["offset"] if spans else 0
    if first:
        say(f"{path.stem}: going on after {first:,} of {total:,} bytes")
    encode = partial(_encode, vocab, is_prepared=is_prepared)
    blocks = _blocks(vocab, spans, state["span"], state["offset"])
    # In texts of words, <unk> may be an ordinary word.
    unknown = vocab.unk_id if vocab.kind == "chars" else None
    noted = first
    began = said = time.monotonic()
    with temporary.open("r+b" if temporary.exists() else "wb") as file:
        file.truncate(state["tokens"] * dtype.itemsize)
        file.seek(0, os.SEEK_END)
        for block, tokens in _mapped(encode, blocks, n_threads):
            try:
                tokens = tokens()
            except ValueError as error:
                raise _located(vocab, spans[block.span], error) from error
            file.write(tokens.astype(dtype).data)
            state["tokens"] += len(tokens)
            state["unknown"] += 0 if unknown is None else int(np.count_nonzero(tokens == unknown))
            offset = block.stop - spans[block.span].start
            ready = before[block.span] + offset
            if ready - noted >= NOTED_BYTES and _may_go_on_after(vocab, block):
                file.flush()
                os.fsync(file.fileno())
                noted = ready
                state |= {"span": block.span, "offset": offset}
                replace_file(note, json.dumps(state).encode())
            if (now := time.monotonic()) - said > _SECONDS_BETWEEN_LINES:
                said, speed = now, (ready - first) / 1e6 / (now - began)
                say(f"{path.stem}: {ready:,} of {total:,} bytes, {speed:.1f} MB/s")
        file.flush()
        os.fsync(file.fileno())
    about = {"file": path.name, "tokens": state["tokens"], "bytes": total}
    about |= {"sha256": checksum(temporary), "unknown": state["unknown"]}
    temporary.replace(path)
    replace_file(note, json.dumps(about).encode())
    return about


def _read_note(note: Path, temporary: Path, itemsize: int) -> dict[str, Any]:
    """Return how far the tokens are written; from the beginning if that cannot be relied on."""
    start = {"span": 0, "offset": 0, "tokens": 0, "unknown": 0}
    if not note.is_file():
        return start
    state = json.loads(note.read_bytes())
    if "sha256" in state:
        return state
    size = temporary.stat().st_size if temporary.is_file() else 0
    return state if size >= state["tokens"] * itemsize else start


def _mapped(
    encode: Callable[[_Block], np.ndarray], blocks: Iterable[_Block], n_threads: int
) -> Iterator[tuple[_Block, Callable[[], np.ndarray]]]:
    """Yield each block, in order, with a function that returns its tokens."""
    if n_threads < 2:
        for block in blocks:
            yield block, partial(encode, block)
        return
    with ThreadPoolExecutor(n_threads) as pool:
        waiting = deque[tuple[_Block, Callable[[], np.ndarray]]]()
        for block in blocks:
            waiting.append((block, pool.submit(encode, block).result))
            if len(waiting) > 2 * n_threads:
                yield waiting.popleft()
        yield from waiting


def _has_bytes(vocab: Vocab) -> bool:
    """Whether each token is a byte."""
    is_imported = isinstance(vocab, ImportedVocab) and vocab.rules.join == "bytes"
    return vocab.kind == "bytes" or is_imported


def _may_go_on_after(vocab: Vocab, block: _Block) -> bool:
    """Whether what follows a block can be read without it: ``<eos>`` ends lines that have words."""
    is_of_lines = vocab.kind in ("words", "integers")
    return not is_of_lines or (isinstance(block.content, str) and block.content.endswith("\n"))


def _blocks(vocab: Vocab, spans: Sequence[Span], first: int, offset: int) -> Iterator[_Block]:
    for index in range(first, len(spans)):
        span = spans[index]
        stop = span.start + (offset if index == first else 0)
        rest = Span(span.path, stop, span.stop)
        if _has_bytes(vocab):
            blocks: Iterable[str | bytes] = read_bytes(rest)
        elif isinstance(vocab, ImportedVocab):
            blocks = _lines(vocab, rest)
        else:
            blocks = read_blocks(vocab.kind, [rest])
        for content in blocks:
            n_bytes = len(content.encode() if isinstance(content, str) else content)
            # A last line without a line end may have got one.
            stop = min(stop + n_bytes, span.stop)
            yield _Block(content, index, stop)


def _lines(vocab: ImportedVocab, span: Span) -> Iterator[str]:
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


def _encode(vocab: Vocab, block: _Block, *, is_prepared: bool) -> np.ndarray:
    if isinstance(block.content, str):
        return vocab.encode_array(block.content, prepared=is_prepared)
    tokens = _id_of_bytes(vocab)[np.frombuffer(block.content, dtype=np.uint8)]
    if (tokens == _MISSING).any():
        raise DataError("it holds bytes that the vocabulary has no symbol for")
    return tokens[tokens >= 0]


@lru_cache(maxsize=1)
def _id_of_bytes(vocab: Vocab) -> np.ndarray:
    ids = np.full(256, _MISSING, dtype=np.int64)
    ids[ord("\n")] = _LEFT_OUT
    for number in range(len(vocab)):
        # Symbols that were added to the bytes are in no text.
        if len(written := vocab.decode_bytes([number])) == 1:
            ids[written[0]] = number
    return ids


def _located(vocab: Vocab, span: Span, error: ValueError) -> ValueError:
    """Return an error with the file, and the line of the first unknown symbol, if there is one."""
    if _has_bytes(vocab) or (place := find_unknown(vocab, [span])) is None:
        named = str(span.path) in str(error)
        return error if named else DataError(f"{span.path}: {error}")
    path, line, unknown = place
    return DataError(f"{path}: {vocab.refusal(unknown, line)}")


def find_unknown(vocab: Vocab, spans: Iterable[Span]) -> tuple[Path, int, Counter[str]] | None:
    """Find the unknown symbols of the first file with any, and the first line of them."""
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
