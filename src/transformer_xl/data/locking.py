"""One process at a time builds, fetches or verifies: a lock that ends with the process."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

LOCK = "lock"
Say = Callable[[str], None]
"""Takes a line of text for the user."""
_Found = TypeVar("_Found")


@contextmanager
def locked(
    folder: Path, say: Say, activity: str = "another process is preparing this corpus"
) -> Iterator[bool]:
    """Hold the lock of a folder, waiting while another process does; a read-only one needs none.

    Yields whether the folder is ours now; not when the other process finished and removed it.
    """
    lock = FileLock(folder / LOCK, poll_interval=0.2, thread_local=False)
    try:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            say(f"{activity}; waiting for it")
            lock.acquire()
    except FileNotFoundError:
        yield False
        return
    except OSError as error:
        has_no_locks = error.errno in (errno.ENOLCK, errno.EOPNOTSUPP)
        if os.access(folder, os.W_OK) and not has_no_locks:
            raise
        yield True
        return
    try:
        yield True
    finally:
        lock.release()


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
