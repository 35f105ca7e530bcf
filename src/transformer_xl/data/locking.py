"""One process at a time builds, fetches or verifies."""

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
def locked(
    folder: Path, say: Say, activity: str = "another process is preparing this corpus"
) -> Iterator[bool]:
    """Hold the lock of a folder, waiting while another process does; a read-only one needs none.

    Yields whether the folder is ours now; not when the other process finished and removed it.
    """
    with ExitStack() as stack:
        is_ours = True
        try:
            stack.enter_context(locked_file(folder / LOCK, f"{activity}; waiting for it", say))
        except FileNotFoundError:
            is_ours = False
        except OSError:
            if os.access(folder, os.W_OK):
                raise
        yield is_ours


def once(
    folder: Path, say: Say, activity: str, find: Callable[[], _Found], make: Callable[[], object]
) -> _Found:
    """Return what ``find`` finds in a folder; if that is nothing, ``make`` it.

    If another process makes it, this one waits and takes what that one has made.
    """
    if not (found := find()):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, say, activity):
            if not (found := find()):
                make()
                found = find()
    return found
