"""Files and folders that are there as a whole or not at all."""

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNFINISHED = ".unfinished-"
"""Begin of the names of folders that are being written or removed: what a kill leaves of them."""
TEMPORARY = ".*.tmp"
"""Pattern of the names of what is being written."""
# What nobody has written to for so long belongs to a process that was killed.
# Whether one still runs cannot be asked where folders are shared between machines or containers.
_LEFT_SECONDS = 24 * 3600


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then move it there.

    Several processes may write the same path, on one machine or on several: each has a file of its
    own, and who ends last counts. What killed ones left beside ``path`` is removed after a day.

    Raises:
        OSError: The file cannot be written; what was at ``path`` is still there.
    """
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        with default_mode(temporary):
            write(temporary)
        sync(temporary)
        temporary.replace(path)
    except Exception as error:
        if is_disk_full(error):
            raise OSError(f"the disk is full: {path} was not written") from error
        # By name: loading safetensors would make the command line slow to answer.
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise OSError(
                f"cannot write {path}: {getattr(error, 'strerror', None) or error}"
            ) from error
        raise
    finally:
        # The folder may be what cannot be written.
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def default_mode(path: Path) -> Iterator[None]:
    """Give a file written in a ``with`` block the mode that the umask gives to new files.

    Some libraries choose another one: safetensors writes files that only their owner can read.
    """
    # Created to learn its mode: the umask can only be read by setting it, which other threads see.
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    yield
    path.chmod(mode)


def replace_file(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` atomically."""
    write_atomically(path, lambda temporary: temporary.write_bytes(content))


def require_model_place(path: Path) -> None:
    """Check, before anything is loaded, that there is something where a model is said to be.

    Raises:
        FileNotFoundError: There is nothing.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: give a model folder or a run folder")


def require_new(folder: Path) -> None:
    """Check that a folder does not exist, or is empty.

    Raises:
        FileExistsError: It holds something, or is a file.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty: choose another folder")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a folder to fill; when that is done without an error, it becomes ``folder``.

    Several processes may do this: each fills its own, and who ends first has made ``folder``. What
    killed ones left beside it is removed after a day.

    Args:
        folder: An absolute path, so that it has a name.

    Raises:
        FileExistsError: By the end, ``folder`` holds something.
        OSError: It cannot be written.
    """
    temporary = _temporary(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    temporary.mkdir()
    try:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            sync(path)
        require_new(folder)
        temporary.replace(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error was caused by a full disk, also where a library gave it another name."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        # safetensors passes on the words of the system alone.
        if os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


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


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def _remove_leftovers(path: Path) -> None:
    for left in path.parent.iterdir():
        if re.fullmatch(rf"\.{re.escape(path.name)}\.[0-9a-f]+\.tmp", left.name):
            # Others tidy up, too.
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _LEFT_SECONDS:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
