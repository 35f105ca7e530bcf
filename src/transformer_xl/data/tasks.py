"""Tasks of preparing a corpus, performed in this process or in worker processes.

A task writes its file atomically, so that it can be interrupted at any moment and repeated. Worker
processes read pickled tasks from their standard input and exit at its end.
"""

import contextlib
import hashlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from transformer_xl.config.files import replace_file, write_atomically
from transformer_xl.data.imported import ImportedVocab
from transformer_xl.data.text import Span, read_blocks, read_bytes, read_text
from transformer_xl.data.vocab import Vocab
from transformer_xl.data.vocab_files import load_vocab

# There is a process for each core.
_ONE_THREAD = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
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
    """Write the tokens of a text, 16 or 32 bits each, with the vocabulary of a folder.

    The file ``described`` is written last. It has the name of the file of the tokens with
    ``.json``, and its ``tokens``, ``unknown``, ``bytes`` and ``sha256``. A text that
    ``is_prepared`` is split at spaces alone, as published corpora are.
    """
    vocab, digest = _vocab(folder), hashlib.sha256()
    # In texts of words, <unk> may be an ordinary word.
    unknown = vocab.unk_id if vocab.kind == "chars" else None
    n_tokens = n_unknown = 0

    def write(path: Path) -> None:
        nonlocal n_tokens, n_unknown
        with path.open("wb") as file:
            for tokens in _encode(vocab, spans, is_prepared):
                block = tokens.astype(token_dtype(vocab))
                digest.update(block.data)
                file.write(block.data)
                n_tokens += len(block)
                n_unknown += 0 if unknown is None else int(np.count_nonzero(block == unknown))

    write_atomically(described.with_suffix(""), write)
    about = {"tokens": n_tokens, "unknown": n_unknown, "bytes": sum(map(len, spans))}
    replace_file(described, json.dumps(about | {"sha256": digest.hexdigest()}).encode())


def token_dtype(vocab: Vocab) -> np.dtype:
    """Return the type in which the tokens of a vocabulary are stored."""
    return np.dtype(np.uint16 if len(vocab) <= 1 << 16 else np.uint32)


@lru_cache(maxsize=1)
def _vocab(folder: Path) -> Vocab:
    return load_vocab(folder)


def _encode(vocab: Vocab, spans: Sequence[Span], is_prepared: bool) -> Iterator[np.ndarray]:
    if vocab.kind == "bytes" or (isinstance(vocab, ImportedVocab) and vocab.rules.join == "bytes"):
        yield from _encode_bytes(vocab, spans)
    elif isinstance(vocab, ImportedVocab):
        for block in _lines(vocab, spans):
            yield vocab.encode_array(block, prepared=is_prepared)
    else:
        for block in read_blocks(vocab.kind, spans):
            try:
                yield vocab.encode_array(block)
            except ValueError as error:
                if (found := find_unknown(vocab, spans)) is None:
                    raise
                path, line, unknown = found
                raise ValueError(f"{path}: {vocab.refusal(unknown, line)}") from error


def _encode_bytes(vocab: Vocab, spans: Sequence[Span]) -> Iterator[np.ndarray]:
    id_of = np.full(256, _MISSING, dtype=np.int64)
    id_of[ord("\n")] = _LEFT_OUT
    for number in range(len(vocab)):
        # Symbols that were added to the bytes are in no text.
        if len(written := vocab.decode_bytes([number])) == 1:
            id_of[written[0]] = number
    for span in spans:
        for block in read_bytes(span):
            tokens = id_of[np.frombuffer(block, dtype=np.uint8)]
            if (tokens == _MISSING).any():
                raise ValueError(f"{span.path} holds bytes that the vocabulary has no symbol for")
            yield tokens[tokens >= 0]


def _lines(vocab: ImportedVocab, spans: Sequence[Span]) -> Iterator[str]:
    """Read spans of text in blocks of whole lines, or in parts of words if lines have no end."""
    for span in spans:
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
    own = threading.local()
    processes: list[subprocess.Popen[bytes]] = []
    free: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()

    def take() -> None:
        own.process = free.get()

    def perform_elsewhere(task: Task) -> Task:
        process = own.process
        try:
            pickle.dump(task, process.stdin)
            process.stdin.flush()
            error = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            error = RuntimeError(
                f"a worker process ended with code {process.wait()}, perhaps for lack of memory: "
                "prepare again with fewer --data.workers; completed parts are kept"
            )
        if error is not None:
            raise error
        return task

    pool = ThreadPoolExecutor(min(n_workers, len(tasks)), initializer=take)
    try:
        for _ in range(min(n_workers, len(tasks))):
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", "from transformer_xl.data.tasks import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            processes.append(process)
            free.put(process)
        for done in as_completed([pool.submit(perform_elsewhere, task) for task in tasks]):
            yield done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
        pool.shutdown()
        for process in processes:
            process.kill()
            # Unread data of a killed process.
            with contextlib.suppress(OSError), process:
                pass


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
