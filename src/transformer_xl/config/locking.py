"""Locks between processes, which end with the process that holds them, however it ends."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from transformer_xl.config.files import NotRegularError, kind_other_than_file
from transformer_xl.errors import TxlError

Say = Callable[[str], None]
"""Takes a line of text for the user."""


class LockedError(TxlError, RuntimeError):
    """Another process holds a lock."""


@contextmanager
def locked(path: Path, held: str, wait: Say | None = None) -> Iterator[None]:
    """Hold the lock of a file, which is made if there is none, and stays.

    Some network file systems have no locks; there, processes are not kept apart.

    Args:
        path: The file; its folder is made too.
        held: What is said while another process holds the lock.
        wait: Takes ``held``, after which this process waits; without it, ``held`` is an error.

    Raises:
        NotRegularError: The path is a link, a folder, a device, a pipe or a socket.
        OSError: The file cannot be created or opened.
        LockedError: Another process holds the lock; only without ``wait``.
    """
    if kind := kind_other_than_file(path, follow=False):
        raise NotRegularError(f"{path} is {kind}, and no lock: delete it")
    lock = FileLock(path, poll_interval=0.2, thread_local=False)
    try:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            if wait is None:
                raise LockedError(held) from None
            wait(held)
            lock.acquire()
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise
    try:
        yield
    finally:
        lock.release()
