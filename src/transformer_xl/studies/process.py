"""A function in a process of its own, which ends with the process that started it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

import torch

from transformer_xl.config import prepare_process

_starting = threading.Lock()
"""Held while a process begins."""


def in_process(threads: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a new process with so many threads, so that its peak memory is its own.

    Raises:
        RuntimeError: The process was killed.
        Exception: What the function raised.
    """
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(
            1, mp_context=context, initializer=_begin, initargs=(threads,)
        ) as worker:
            # OpenMP reads it when the process begins, which is within submit.
            with _starting, _environment("OMP_NUM_THREADS", str(threads)):
                future = worker.submit(_to_its_end, work, *arguments)
            return future.result()
    except BrokenProcessPool as error:
        raise RuntimeError("its process was killed, as is done where memory runs out") from error


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _begin(threads: int) -> None:
    """Prepare a new process as `txl train` does, and let it save and end with its parent."""
    torch.set_num_threads(threads)
    prepare_process()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        signal.raise_signal(signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _to_its_end(work: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function, and end the process if its parent has ended meanwhile.

    A training that was told to stop has saved by then; the pool's own loop would wait forever for
    another call, as this process holds the pipe's other end, too.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    try:
        return work(*arguments)
    finally:
        if not parent.is_alive():
            os._exit(1)
