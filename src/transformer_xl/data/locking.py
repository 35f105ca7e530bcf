"""One process at a time builds, downloads or verifies."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from transformer_xl.config import Say
from transformer_xl.config import locked as locked_file

LOCK = "lock"
_Found = TypeVar("_Found")


@contextmanager
def locked(folder: Path, say: Say, activity: str) -> Iterator[None]:
    """Hold the lock of a folder, waiting while another process does; a read-only one needs none."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked_file(folder / LOCK, f"{activity}; waiting for it", say))
        except OSError:
            if os.access(folder, os.W_OK):
                raise
        yield


def once(
    folder: Path, say: Say, activity: str, find: Callable[[], _Found], make: Callable[[], object]
) -> _Found:
    """Return what ``find`` finds; if that is nothing, ``make`` it under the lock of a folder.

    If another process makes it, this one waits and takes what that one has made.
    """
    if not (found := find()):
        with locked(folder, say, activity):
            if not (found := find()):
                make()
                found = find()
    return found
