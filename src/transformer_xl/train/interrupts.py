"""Ctrl-C and SIGTERM: a run finishes its step and saves before it stops."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):  # noqa: N818  (it is no error)
    """The run was asked to stop and has saved all it needs to go on."""

    def __init__(self, signal_number: int, where: str) -> None:
        super().__init__(f"stopped {where} and saved; the same command goes on from there")
        self.signal_number = signal_number


@contextmanager
def caught_interrupts() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of dying of them; after the first, SIGINT is as usual."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        # SIGTERM may come twice, from a launcher and from who told the launcher.
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        # Nothing is said here: what was just being written may not be interrupted by more.

    for number in numbers:
        signal.signal(number, note)
    try:
        yield caught
    finally:
        for number in numbers:
            signal.signal(number, before[number])
