"""One process at a time builds, downloads or verifies."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from transformer_xl.config import Say, locked

LOCK = "lock"
_Found = TypeVar("_Found")


def once(
    folder: Path, say: Say, activity: str, find: Callable[[], _Found], make: Callable[[], object]
) -> _Found:
    """Return what ``find`` finds; if that is nothing, ``make`` it under the lock of a folder.

    If another process makes it, this one waits and takes what that one has made. A read-only folder
    needs no lock.
    """
    if found := find():
        return found
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / LOCK, f"{activity}; waiting for it", say))
        except OSError:
            if os.access(folder, os.W_OK):
                raise
        if not (found := find()):
            make()
            found = find()
    return found
