"""Where sessions are stored: the interface, and the store in a folder.

The other store is :mod:`transformer_xl.apps.serve.redis_store`.
"""

import hashlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from transformer_xl.apps.serve.errors import SessionMissingError
from transformer_xl.config.files import NotRegularError, kind_other_than_file
from transformer_xl.inference.generate import State, load_state, write_state
from transformer_xl.model import LanguageModel

log = logging.getLogger("transformer_xl.serve")

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""The pattern of a name."""
_SUFFIX = ".safetensors"


def is_name(name: str) -> bool:
    """Whether a session can have this name."""
    return bool(re.fullmatch(NAME, name))


class Turn(NamedTuple):
    """What a request has appended to the text of a session."""

    read: Sequence[int] = ()
    """The tokens of its prompt."""
    drawn: Sequence[int] = ()
    """The tokens that were sampled after it."""


class Lease(NamedTuple):
    """The right to change a session, until it is released, saved, or taken by another server."""

    name: str
    number: int = 0
    """The fencing number: a later lease, of any session, has a larger one."""
    version: int = 0
    """The version of the stored session; 0: none is stored."""
    n_appended: int = 0
    """Tokens, and turns, that were appended since the memory was stored as a whole."""


class Stored(NamedTuple):
    """A session that is stored."""

    name: str
    used: float
    """When it was last used, in seconds since 1970."""
    is_busy: bool = False
    """Whether a server holds a lease."""


class SessionStore(Protocol):
    """A store. Methods may block, and are thread-safe.

    They raise OSError where the store cannot be read or written, RuntimeError where what it holds
    is damaged, ValueError where that belongs to another model, and SessionError.
    """

    is_shared: bool
    """Whether several servers use it at once."""

    def all(self, most: int | None = None) -> list[Stored]:
        """Return the sessions, the most recently used first, at most so many."""
        ...

    def find(self, name: str) -> Stored:
        """Return one without its state."""
        ...

    def acquire(self, name: str, version: int) -> Lease:
        """Acquire a session that the caller knows at a version (0: not at all)."""
        ...

    def release(self, lease: Lease) -> None:
        """Give a lease back; the session is unchanged."""
        ...

    def load(self, name: str, known: tuple[int, State] | None = None) -> tuple[int, State]:
        """Return the version and the state of a session; ``known`` is an earlier one."""
        ...

    def save(self, lease: Lease, state: State, turn: Turn) -> int:
        """Save a state, which ``turn`` led to, and give the lease back; return the version."""
        ...

    def delete(self, name: str) -> None:
        """Delete a session."""
        ...

    def close(self) -> None:
        """Release what it holds; it is not used again."""
        ...


def path_of(folder: Path, name: str) -> Path:
    """Return the file of a session."""
    # Some file systems ignore case; subfolders keep each folder small.
    digest = hashlib.sha256(name.encode()).hexdigest()
    return folder / digest[:2] / f"{name}.{digest[:12]}{_SUFFIX}"


class FolderStore:
    """A folder with a file for each session, of one server.

    Files are those of :func:`~transformer_xl.inference.generate.write_state`, replaced atomically.
    Only regular files are opened, and no link is followed.

    Args:
        folder: The folder.
        weights: The checksum of the weights to which the memories belong.
        model: The model that reads them. None: files are not checked against one.

    Raises:
        OSError: The folder cannot be created.
    """

    is_shared = False

    def __init__(self, folder: Path, weights: str, model: LanguageModel | None) -> None:
        self._folder, self._weights, self._model = folder, weights, model
        folder.mkdir(parents=True, exist_ok=True)

    def all(self, most: int | None = None) -> list[Stored]:
        """Find all sessions."""
        found: list[Stored] = []
        for part in sorted(self._folder.iterdir()):
            if not re.fullmatch("[0-9a-f]{2}", part.name):
                continue
            try:
                if (kind := kind_other_than_file(part, follow=False)) != "a folder":
                    _ignore(part, f"is {kind}")
                    continue
                for path in part.iterdir():
                    name = path.name.removesuffix(_SUFFIX).rpartition(".")[0]
                    if not is_name(name) or path != path_of(self._folder, name):
                        continue
                    if kind := kind_other_than_file(path, follow=False):
                        _ignore(path, f"is {kind}")
                    else:
                        found.append(Stored(name, path.lstat().st_mtime))
            except OSError as error:
                # Deleted meanwhile, or of another user.
                _ignore(part, str(error.strerror))
        return sorted(found, key=lambda each: each.used, reverse=True)[:most]

    def find(self, name: str) -> Stored:
        """Return one without its state."""
        try:
            return Stored(name, path_of(self._folder, name).lstat().st_mtime)
        except FileNotFoundError as error:
            raise SessionMissingError(f"there is no session {name!r}") from error

    def acquire(self, name: str, version: int) -> Lease:
        """Require that the place of a new session is free: nobody else changes the folder."""
        path = path_of(self._folder, name)
        # Found now, and not when the answer is saved.
        if not version and (kind := kind_other_than_file(path, follow=False)):
            raise NotRegularError(f"{path} is {kind}, and not the file of a session")
        return Lease(name, version=version)

    def release(self, lease: Lease) -> None:
        """Do nothing."""

    def load(self, name: str, known: tuple[int, State] | None = None) -> tuple[int, State]:
        """Load a state; each has version 1."""
        path = path_of(self._folder, name)
        return 1, load_state(path, self._weights, self._model, follow=False)

    def save(self, lease: Lease, state: State, turn: Turn) -> int:
        """Save a state as a whole."""
        path = path_of(self._folder, lease.name)
        if path.parent.is_symlink():
            raise NotRegularError(f"{path.parent} is a symbolic link, and not a folder")
        write_state(path, state, self._weights)
        return 1

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        path_of(self._folder, name).unlink(missing_ok=True)

    def close(self) -> None:
        """Do nothing."""


def _ignore(path: Path, why: str) -> None:
    log.warning("ignored in the folder of the sessions: %r: %s", str(path), why)
