"""One builder at a time: a lock that ends with the process that holds it."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Where there is none, who builds twice builds the same.
    fcntl = None

LOCK = "lock"
_SECONDS = 0.2


@contextmanager
def locked(
    folder: Path,
    say: Callable[[str], None],
    waiting: str = "another process is preparing this corpus",
) -> Iterator[bool]:
    """Hold the lock of a folder, waiting while another process does.

    Args:
        folder: The folder. One that cannot be written needs no lock.
        say: Takes a line of text for the user.
        waiting: What that line says when this process has to wait.

    Yields:
        Whether the folder is ours now; False when the other process finished and took it away.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except FileNotFoundError:
        yield False
        return
    except OSError:
        if os.access(folder, os.W_OK):
            raise
        yield True
        return
    try:
        has_said = False
        while fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not has_said:
                    say(f"{waiting}; waiting for it")
                has_said = True
                time.sleep(_SECONDS)
            except OSError:
                break  # A file system without locks.
        is_there = False
        with suppress(FileNotFoundError):
            is_there = os.path.samestat((folder / LOCK).stat(), os.fstat(descriptor))
        yield is_there
    finally:
        os.close(descriptor)
