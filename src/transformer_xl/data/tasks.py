"""Tasks of preparing a corpus, performed in this process or in worker processes.

A task writes its file atomically, so that it can be interrupted at any moment and repeated. Worker
processes read pickled tasks from their standard input and exit at its end.
"""

import contextlib
import hashlib
import json
import os
import pickle
import queue
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np

from transformer_xl.config.files import replace_file, write_atomically
from transformer_xl.data.imported import ImportedVocab
from transformer_xl.data.text import Span, read_blocks, read_bytes, read_text
from transformer_xl.data.vocab import Vocab, symbols_in
from transformer_xl.data.vocab_files import load_vocab

# Bytes without an ID: omitted ones, and those that are an error.
_LEFT_OUT, _MISSING = -1, -2
# Where a text of characters can be split for vocabularies with own rules for blanks.
_WITHIN_A_WORD = re.compile(r"[!-~](?=[!-~])")


class Task(NamedTuple):
    """A call ``do(*given, target)`` that writes a file, needed unless the file exists."""

    do: Callable[..., None]
    given: tuple[Any, ...]
    target: Path
    size: int
    """Bytes that it reads."""


Executor = Callable[[Sequence[Task], int], Iterable[Task]]
"""Performs tasks with a number of workers, in any order, and yields each when it is done."""


def perform(task: Task) -> None:
    """Perform a task, unless its file exists."""
    if not task.target.is_file():
        task.do(*task.given, task.target)


def encode_part(folder: Path, spans: Sequence[Span], is_prepared: bool, described: Path) -> None:
    """Write the tokens of a text, and a description of the file to that name with ``.json``.

    Args:
        folder: The folder of the vocabulary.
        spans: The text.
        is_prepared: Whether the text is split at spaces alone, as published corpora are.
        described: The second file: ``tokens``, ``unknown``, ``bytes``, ``sha256`` of the first,
            which has 16 or 32 bits per token.
    """
    vocab = _vocab(folder)
    about: dict[str, Any] = {}
    target = described.with_suffix("")
    write_atomically(target, lambda path: about.update(_write(vocab, spans, path, is_prepared)))
    replace_file(described, json.dumps(about).encode())


def token_dtype(vocab: Vocab) -> np.dtype:
    """Return the type in which the tokens of a vocabulary are stored."""
    return np.dtype(np.uint16 if len(vocab) <= 1 << 16 else np.uint32)


@lru_cache(maxsize=1)
def _vocab(folder: Path) -> Vocab:
    return load_vocab(folder)


def _write(vocab: Vocab, spans: Sequence[Span], path: Path, is_prepared: bool) -> dict[str, Any]:
    digest = hashlib.sha256()
    n_tokens = n_unknown = 0
    # In texts of words, <unk> may be an ordinary word.
    unknown = vocab.unk_id if vocab.kind == "chars" else None
    dtype = token_dtype(vocab)
    with path.open("wb") as file:
        for tokens in _encode(vocab, spans, is_prepared):
            block = np.asarray(tokens).astype(dtype)
            digest.update(block.data)
            file.write(block.data)
            n_tokens += len(block)
            n_unknown += 0 if unknown is None else int(np.count_nonzero(block == unknown))
    return {
        "tokens": n_tokens,
        "unknown": n_unknown,
        "bytes": sum(map(len, spans)),
        "sha256": digest.hexdigest(),
    }


def _encode(
    vocab: Vocab, spans: Sequence[Span], is_prepared: bool
) -> Iterator[np.ndarray | list[int]]:
    is_imported = isinstance(vocab, ImportedVocab)
    if vocab.kind == "bytes" or (is_imported and vocab.rules.join == "bytes"):
        yield from _encode_bytes(vocab, spans)
    elif is_imported:
        yield from _encode_lines(vocab, spans, is_prepared)
    elif vocab.kind in ("chars", "words", "integers"):
        yield from _encode_symbols(vocab, spans)
    else:
        for block in read_blocks(vocab.kind, spans):
            yield vocab.encode(block)


def _encode_bytes(vocab: Vocab, spans: Sequence[Span]) -> Iterator[np.ndarray]:
    number_of = np.full(256, _MISSING, dtype=np.int64)
    number_of[ord("\n")] = _LEFT_OUT
    for number in range(len(vocab)):
        (byte,) = vocab.decode_bytes([number])
        number_of[byte] = number
    for span in spans:
        for block in read_bytes(span):
            tokens = number_of[np.frombuffer(block, dtype=np.uint8)]
            if (tokens == _MISSING).any():
                raise ValueError(f"{span.path} holds bytes that the vocabulary has no symbol for")
            yield tokens[tokens >= 0]


def _encode_lines(
    vocab: ImportedVocab, spans: Sequence[Span], is_prepared: bool
) -> Iterator[list[int]]:
    for span in spans:
        waiting = ""
        for text in read_text(span):
            waiting += text
            cut = waiting.rfind("\n") + 1
            if not cut and vocab.rules.join == "chars" and vocab.eos_id is None:
                cut = max((x.end() for x in _WITHIN_A_WORD.finditer(waiting)), default=0)
            yield vocab.encode_lines(waiting[:cut], prepared=is_prepared)
            waiting = waiting[cut:]
        # A last line without a line end gets one.
        end = "\n" if waiting.strip() and vocab.eos_id is not None else ""
        yield vocab.encode_lines(waiting + end, prepared=is_prepared)


def _encode_symbols(vocab: Vocab, spans: Sequence[Span]) -> Iterator[np.ndarray]:
    unknown = _MISSING if vocab.unk_id is None else vocab.unk_id
    number_of = {symbol: number for number, symbol in enumerate(vocab.symbols)}
    # Characters are looked up by code point; unknown ones find the last entry.
    points = {ord(x): n for x, n in number_of.items() if vocab.kind == "chars" and len(x) == 1}
    table = np.full(max(points, default=0) + 2, unknown, dtype=np.int64)
    table[list(points)] = list(points.values())
    for block in read_blocks(vocab.kind, spans):
        if vocab.kind == "chars":
            found = np.frombuffer(block.encode("utf-32-le"), dtype=np.uint32)
            tokens = table[np.minimum(found, len(table) - 1)]
        else:
            numbers = map(number_of.get, symbols_in(vocab.kind, block), repeat(unknown))
            tokens = np.fromiter(numbers, dtype=np.int64)
        if unknown == _MISSING and (tokens == _MISSING).any():
            refused = find_unknown(vocab, spans)
            assert refused is not None
            path, line, symbols = refused
            raise ValueError(f"{path}: {vocab.refusal(symbols, line)}")
        yield tokens


def find_unknown(vocab: Vocab, spans: Iterable[Span]) -> tuple[Path, int, Counter[str]] | None:
    """Find the unknown symbols of the first file with any, and the first line of them."""
    for span in spans:
        line, first, unknown = 1, 0, Counter[str]()
        for block in read_bytes(Span(span.path, 0, span.start)):
            line += block.count(b"\n")
        for text in read_blocks(vocab.kind, [span]):
            found = vocab.unknown(text)
            if found and not first:
                first = line + vocab.first_unknown_line(text) - 1
            line += text.count("\n")
            unknown.update(found)
        if unknown:
            return span.path, first, unknown
    return None


def perform_all(tasks: Sequence[Task], n_workers: int) -> Iterator[Task]:
    """Perform tasks, here or in ``n_workers`` processes; yield each when it is done."""
    if n_workers < 2 or len(tasks) < 2:
        for task in tasks:
            perform(task)
            yield task
        return
    processes = [_start() for _ in range(min(n_workers, len(tasks)))]
    idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
    for process in processes:
        idle.put(process)

    def perform_elsewhere(task: Task) -> Task:
        process = idle.get()
        try:
            _ask(process, task)
        finally:
            # Also a process that has exited, so that no thread waits for it forever.
            idle.put(process)
        return task

    pool = ThreadPoolExecutor(len(processes))
    try:
        for done in as_completed([pool.submit(perform_elsewhere, task) for task in tasks]):
            yield done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
            process.wait()
        pool.shutdown()
        for process in processes:
            for pipe in (process.stdin, process.stdout):
                # Unread data of a killed process.
                with contextlib.suppress(OSError):
                    cast(IO[bytes], pipe).close()


def _start() -> "subprocess.Popen[bytes]":
    # One thread each, as there is a process for each core.
    environment = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-c", "from transformer_xl.data.tasks import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


def _ask(process: "subprocess.Popen[bytes]", task: Task) -> None:
    """Let a worker perform a task; raise the error of the worker, if any."""
    try:
        stdin = cast(IO[bytes], process.stdin)
        pickle.dump(task, stdin)
        stdin.flush()
        error = pickle.load(cast(IO[bytes], process.stdout))
    except (OSError, EOFError, pickle.UnpicklingError):
        error = RuntimeError(
            f"a worker process ended with code {process.wait()}, perhaps for lack of memory: "
            "prepare again with fewer --data.workers; completed parts are kept"
        )
    if error is not None:
        raise error


def main() -> None:
    """Perform the tasks that arrive on the standard input."""
    # Ctrl-C is handled by the parent process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError):
        while True:
            task, error = pickle.load(sys.stdin.buffer), None
            try:
                perform(task)
            except (ValueError, OSError, RuntimeError) as failure:
                error = failure
            pickle.dump(error, sys.stdout.buffer)
            sys.stdout.flush()
