"""The pieces of work that preparing a corpus is made of, done here or by other processes.

A task is a JSON object; what it makes is a file that appears when it is whole, so that a task can
be stopped at any moment and done again. The processes read tasks from their standard input, one a
line, and end when it does::

    python -m transformer_xl.data.tasks
"""

import contextlib
import hashlib
import itertools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from transformer_xl.config.files import replace_file, write_atomically
from transformer_xl.data.counting import count_part
from transformer_xl.data.imported import ImportedVocab
from transformer_xl.data.text import Span, read_blocks, read_bytes, read_text
from transformer_xl.data.unpacking import Unpacking, unpack
from transformer_xl.data.vocab import Vocab, symbols_in
from transformer_xl.data.vocab_files import load_vocab

Task = dict[str, Any]

# Bytes that have no number: those that are left out, and those that are an error.
_LEFT_OUT, _MISSING = -1, -2
# Where a text of characters can be cut for vocabularies that treat blanks in ways of their own.
_WITHIN_A_WORD = re.compile(r"[!-~](?=[!-~])")
_ERRORS = {"ValueError": ValueError, "FileNotFoundError": FileNotFoundError, "OSError": OSError}


def encode_task(
    folder: Path, spans: Sequence[Span], target: Path, *, is_prepared: bool = False
) -> Task:
    """Return the task to write ``target``, the symbols of some text, and what it holds beside it.

    Args:
        folder: Where the vocabulary lies.
        spans: The text.
        target: A file of 16 or 32 bits a symbol; ``target`` with ``.json`` describes it.
        is_prepared: Words are what stands between spaces, whatever rules a vocabulary of old has.
    """
    return {
        "do": "encode",
        "is_prepared": is_prepared,
        "folder": str(folder),
        "spans": [[str(span.path), span.start, span.stop] for span in spans],
        "target": str(target),
    }


def count_task(kind: str, spans: Sequence[Span], target: Path) -> Task:
    """Return the task to count the symbols of some text into ``target``."""
    listed = [[str(span.path), span.start, span.stop] for span in spans]
    return {"do": "count", "kind": kind, "spans": listed, "target": str(target)}


def unpack_task(path: Path, target: Path, how: Unpacking, field: str, part: str) -> Task:
    """Return the task to write the text of a file to ``target``, as `unpack` does."""
    settings = {"how": how, "field": field, "part": part}
    return {"do": "unpack", "path": str(path), "target": str(target), **settings}


def perform(task: Task) -> None:
    """Do a task, unless its file is there already.

    Raises:
        ValueError: The text does not fit the vocabulary, or is none.
        OSError: A file cannot be read or written.
    """
    target = Path(task["target"])
    if is_done(task):
        return
    if task["do"] == "unpack":
        target.parent.mkdir(parents=True, exist_ok=True)
        unpack(Path(task["path"]), target, task["how"], task["field"], task["part"])
        return
    spans = [Span(Path(path), start, stop) for path, start, stop in task["spans"]]
    if task["do"] == "count":
        write_atomically(target, lambda path: count_part(task["kind"], spans, path))
        return
    vocab = _vocab(task["folder"])
    about: dict[str, Any] = {}
    is_prepared = task["is_prepared"]
    write_atomically(target, lambda path: about.update(_write(vocab, spans, path, is_prepared)))
    replace_file(_described(target), json.dumps(about).encode())


def is_done(task: Task) -> bool:
    """Whether a task left its file."""
    target = Path(task["target"])
    return (_described(target) if task["do"] == "encode" else target).is_file()


def describe(target: Path) -> dict[str, Any]:
    """Return what the file of an encoding task holds: ``tokens``, ``bytes``, ``sha256``."""
    return json.loads(_described(target).read_text(encoding="utf-8"))


def _described(target: Path) -> Path:
    return target.with_name(f"{target.name}.json")


def token_dtype(vocab: Vocab) -> np.dtype:
    """Return in how many bits the symbols of a vocabulary are stored."""
    return np.dtype(np.uint16 if len(vocab) <= 1 << 16 else np.uint32)


@lru_cache(maxsize=1)
def _vocab(folder: str) -> Vocab:
    return load_vocab(folder)


def _write(vocab: Vocab, spans: Sequence[Span], path: Path, is_prepared: bool) -> dict[str, Any]:
    digest = hashlib.sha256()
    n_tokens = n_unknown = 0
    # Of words, it is in some texts a word like any other.
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
    elif vocab.kind == "chars":
        yield from _encode_characters(vocab, spans)
    elif vocab.kind in ("words", "integers"):
        yield from _encode_words(vocab, spans)
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


def _encode_characters(vocab: Vocab, spans: Sequence[Span]) -> Iterator[np.ndarray]:
    unknown = _MISSING if vocab.unk_id is None else vocab.unk_id
    points = [ord(symbol) for symbol in vocab.symbols if len(symbol) == 1]
    number_of = np.full(max(points, default=0) + 2, unknown, dtype=np.int64)
    for number, symbol in enumerate(vocab.symbols):
        if len(symbol) == 1:
            number_of[ord(symbol)] = number
    for block in read_blocks("chars", spans):
        found = np.frombuffer(block.encode("utf-32-le"), dtype=np.uint32)
        tokens = number_of[np.minimum(found, len(number_of) - 1)]
        if unknown == _MISSING and (tokens == _MISSING).any():
            raise _refusal(vocab, spans)
        yield tokens


def find_unknown(vocab: Vocab, spans: Iterable[Span]) -> tuple[Path, int, Counter[str]] | None:
    """Find what the first file that has any holds without a symbol, and from which line on."""
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


def _refusal(vocab: Vocab, spans: Sequence[Span]) -> ValueError:
    found = find_unknown(vocab, spans)
    assert found is not None
    path, line, unknown = found
    return ValueError(f"{path}: {vocab.refusal(unknown, line)}")


def _encode_words(vocab: Vocab, spans: Sequence[Span]) -> Iterator[np.ndarray]:
    unknown = _MISSING if vocab.unk_id is None else vocab.unk_id
    number_of = {symbol: number for number, symbol in enumerate(vocab.symbols)}
    for block in read_blocks(vocab.kind, spans):
        numbers = map(number_of.get, symbols_in(vocab.kind, block), itertools.repeat(unknown))
        tokens = np.fromiter(numbers, dtype=np.int64)
        if unknown == _MISSING and (tokens == _MISSING).any():
            raise _refusal(vocab, spans)
        yield tokens


def perform_all(tasks: Sequence[Task], n_workers: int) -> Iterator[Task]:
    """Do tasks, here or in ``n_workers`` processes; return each as it is done.

    Raises:
        ValueError: A text does not fit the vocabulary, or is none.
        OSError: A file cannot be read or written.
        RuntimeError: A process ended without an answer.
    """
    if n_workers < 2 or len(tasks) < 2:
        for task in tasks:
            perform(task)
            yield task
        return
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    answers: queue.SimpleQueue[tuple[Task | None, str]] = queue.SimpleQueue()
    processes = [_start() for _ in range(min(n_workers, len(tasks)))]
    threads = [
        threading.Thread(target=_serve, args=(process, waiting, answers), daemon=True)
        for process in processes
    ]
    try:
        for thread in threads:
            thread.start()
        for _ in tasks:
            task, failure = answers.get()
            if failure:
                kind, _, message = failure.partition(": ")
                raise _ERRORS.get(kind, RuntimeError)(message)
            assert task is not None
            yield task
    finally:
        for process in processes:
            process.kill()
        for process, thread in zip(processes, threads, strict=True):
            process.wait()
            if thread.is_alive():
                thread.join()
            for pipe in (process.stdin, process.stdout):
                # What was not taken any more.
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()


def _start() -> "subprocess.Popen[bytes]":
    # One thread each: there are as many processes as cores.
    environment = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "transformer_xl.data.tasks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


def _serve(
    process: "subprocess.Popen[bytes]",
    waiting: "queue.SimpleQueue[Task]",
    answers: "queue.SimpleQueue[tuple[Task | None, str]]",
) -> None:
    """Give a process one task after another."""
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None
    while True:
        try:
            task = waiting.get_nowait()
        except queue.Empty:
            return
        answer = b""
        try:
            stdin.write(json.dumps(task).encode() + b"\n")
            stdin.flush()
            answer = stdout.readline()
        except (OSError, ValueError):
            pass
        failure = (
            json.loads(answer)["error"]
            if answer
            else f"RuntimeError: a process that cut text ended with code {process.poll()}: was "
            "there enough memory? Prepare again with fewer --data.workers; what is done is kept"
        )
        answers.put((task, failure))
        if failure:
            return


def main() -> None:
    """Do the tasks that come on the standard input."""
    # Ctrl-C is for the process that asked.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        error = ""
        try:
            perform(cast(Task, json.loads(line)))
        except (ValueError, OSError, RuntimeError) as failure:
            kind = next(
                name for name, x in (*_ERRORS.items(), ("", Exception)) if isinstance(failure, x)
            )
            error = f"{kind or 'RuntimeError'}: {failure}"
        sys.stdout.write(json.dumps({"error": error}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
