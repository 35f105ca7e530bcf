"""Files that are there as a whole or not at all."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then move it there.

    Raises:
        OSError: The file cannot be written; what was at ``path`` is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        sync(temporary)
        temporary.replace(path)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(f"the disk is full: {path} was not written") from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` atomically."""
    write_atomically(path, lambda temporary: temporary.write_bytes(content))


def sync(path: Path) -> None:
    """Wait until a file or the entries of a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_space(folder: Path, n_bytes: int, what: str) -> None:
    """Check that ``n_bytes`` fit on the disk of an existing folder.

    Raises:
        OSError: They do not.
    """
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise OSError(
            f"{what} needs {n_bytes / 1e6:,.0f} MB and {folder} has {free / 1e6:,.0f} MB free; "
            "make room or choose a folder on another disk"
        )
