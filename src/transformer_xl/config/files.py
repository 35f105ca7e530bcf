"""Atomic writes of files and folders, checksums and disk space."""

import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from transformer_xl.errors import InputError

SHIPPED = Path(__file__).parents[1] / "pretrained"
"""The folder of the models that come with the package. Nothing is written there."""
SMALL = 32 << 20
"""Bytes that a file of settings has at most."""
_NAMED = 50
"""Characters of a name that are in that of its temporary folder, of at most 255 bytes."""


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file in a temporary folder with ``write``, then rename it to ``path``.

    Several processes may write the same path, also from several machines; the last one wins. What
    a killed process left is removed by `remove_temporary`.

    Raises:
        OSError: The file cannot be written; an existing one is intact.
        PermissionError: It belongs to a shipped model.
    """
    require_not_shipped(path)
    _require_no_other(path)
    try:
        # In a folder, as safetensors writes a temporary file of its own beside the file.
        with _temporary_folder(path) as folder:
            temporary = folder / path.name
            # The mode according to the umask: safetensors writes files that only their owner reads.
            temporary.touch()
            mode = stat.S_IMODE(temporary.stat().st_mode)
            write(temporary)
            temporary.chmod(mode)
            sync(temporary)
            temporary.replace(path)
    except Exception as error:
        if is_disk_full(error):
            raise OSError(f"the disk is full: {path} was not written") from error
        # By name, as importing safetensors would slow down the command line.
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            reason = getattr(error, "strerror", None) or error
            raise OSError(f"cannot write {path}: {reason}") from error
        raise


class NotRegularError(OSError):
    """A path is no regular file: a link, a folder, a device, a pipe or a socket."""


def kind_other_than_file(path: Path, *, follow: bool = True) -> str | None:
    """Return what a path is that is no regular file; None if it is one, or nothing.

    ``follow``: look at what a symbolic link points to. A link to nothing is a symbolic link.
    """
    try:
        mode = path.stat().st_mode if follow else path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "a symbolic link to nothing" if path.is_symlink() else None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "a symbolic link to itself"
        raise
    kinds = {
        stat.S_IFREG: None,
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


def open_regular(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading: a pipe would block the process, a device never end.

    ``follow``: whether the file, or the folder that it is in, may be a symbolic link.

    Raises:
        FileNotFoundError: There is none.
        NotRegularError: It is something else, or without ``follow`` a symbolic link.
        OSError: It cannot be read.
    """
    # Before it is opened: to open a device can change it.
    if other := kind_other_than_file(path, follow=follow):
        raise NotRegularError(f"{path} is {other}, and not a regular file: give a file")
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    # It may have been exchanged in between.
    flags |= getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags) if follow else _open_itself(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularError(f"{path} is not a regular file: give a file")
    return os.fdopen(descriptor, "rb")


def _open_itself(path: Path, flags: int) -> int:
    """Open a file that is no symbolic link, in a folder that is none."""
    if os.open not in os.supports_dir_fd:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            return os.open(path.name, flags | os.O_NOFOLLOW, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise NotRegularError(
            f"{path}, or its folder, is a symbolic link: give a file that is none"
        ) from error


def same_file(path: Path, opened: BinaryIO) -> Path:
    """Return a path by which another program opens a file that is open, not by its name.

    The file that ``path`` names may have been exchanged, and its name may not be UTF-8. ``path``
    itself where the system has no such paths.
    """
    descriptor = Path(f"/dev/fd/{opened.fileno()}")
    return descriptor if descriptor.exists() else path


def read_small_file(path: Path, most: int = SMALL) -> bytes:
    """Read a regular file that is small if it is what it claims to be, as of settings.

    Raises:
        OSError: As :func:`open_regular`.
        ValueError: It has more than ``most`` bytes.
    """
    with open_regular(path) as file:
        # A file may claim a size and have another, as those of /proc do.
        content = file.read(most + 1)
    if len(content) > most:
        raise InputError(f"{path} has more than {most:,} bytes, which no such file needs")
    return content


def replace_file(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` atomically."""
    write_atomically(path, lambda temporary: temporary.write_bytes(content))


def _require_no_other(path: Path) -> None:
    """Require that a path that is to be replaced by a file is none yet, a file, or a folder.

    Raises:
        OSError: It is something else: a device, a pipe, or a link to nothing.
    """
    if (kind := kind_other_than_file(path)) not in (None, "a folder"):
        raise OSError(f"{path} is {kind}, and no file: delete it, or give another file")


def require_not_shipped(path: Path) -> None:
    """Require that a path that is to be written is not in the folder of the shipped models."""
    if path.resolve().is_relative_to(SHIPPED.resolve()):
        raise PermissionError(
            f"{path} belongs to the models that come with the package, which are not changed: "
            "choose another folder"
        )


def require_new(folder: Path) -> None:
    """Require that a folder does not exist, or is empty and can be replaced, and can be written.

    Raises:
        FileExistsError: It exists and is not empty.
        OSError: It is a link to nothing or a mount point, or its place cannot be written to.
    """
    if folder.is_symlink() and not folder.exists():
        raise OSError(f"{folder} is a symbolic link to nothing: delete it, or give another folder")
    if folder.resolve().is_mount():
        raise OSError(f"{folder} is a mount point, which cannot be replaced: give a folder in it")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty: choose another folder")
    _require_writable(folder.resolve())


def _require_writable(path: Path) -> None:
    """Require that a file or folder can be made, with the folders above it that are missing."""
    place = next(x for x in path.absolute().parents if x.exists())
    if not place.is_dir():
        raise NotADirectoryError(f"cannot write {path}: {place} is a file, not a folder")
    if not os.access(place, os.W_OK):
        raise PermissionError(
            f"cannot write {path}: no permission for the folder {place}, or its disk is read-only; "
            "give another folder"
        )


def require_new_file(file: Path, *, force: bool = False) -> None:
    """Require that a file can be written, before it is computed; ``force``: it may exist.

    Raises:
        FileExistsError: It exists.
        OSError: It is a folder, a link or a device, or its folder cannot be written to.
    """
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder: give a file in it")
    _require_no_other(file)
    if file.is_symlink() and force:
        raise OSError(
            f"{file} is a symbolic link, which a file would replace: give {file.resolve()}, to "
            "which it points, or delete it"
        )
    if file.exists() and not force:
        raise FileExistsError(f"{file} exists; --force overwrites it")
    _require_writable(file)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to ``folder`` if the block succeeds.

    A symbolic link to an empty folder stays, and that folder is replaced. Several processes may do
    this for the same path; the first one wins.

    Raises:
        FileExistsError: ``folder`` exists and is not empty.
        OSError: It cannot be written, or belongs to the shipped models.
    """
    require_not_shipped(folder)
    require_new(folder)
    folder = folder.resolve()
    with _temporary_folder(folder) as temporary:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            sync(path)
        require_new(folder)
        temporary.replace(folder)
        sync(folder.parent)


@contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder beside ``path``, which is removed at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:_NAMED]}.{secrets.token_hex(8)}.tmp")
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error was caused by a full disk, also if a library converted it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        # safetensors only passes on the message.
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
    """Require free space on the disk of an existing folder."""
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise OSError(
            f"{what} needs {n_bytes / 1e6:,.0f} MB and {folder} has {free / 1e6:,.0f} MB free; "
            "make room or choose a folder on another disk"
        )


def remove_temporary(folder: Path, name: str = "*") -> None:
    """Remove what killed processes left in a folder that no other process is writing.

    ``name`` is the name of the file or folder that was being written, or a pattern.
    """
    for left in folder.glob(f".{name[:_NAMED]}.*.tmp"):
        # Earlier versions wrote temporary files.
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
