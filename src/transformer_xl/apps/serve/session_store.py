"""The stores of sessions of one server: in memory, or in a folder.

The store of several servers is :mod:`transformer_xl.apps.serve.redis_store`.
"""

import hashlib
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from transformer_xl.apps.serve.errors import SessionError
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.config import NotRegularError, kind_other_than_file
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
    number: int
    """The fencing number: a later lease, of any session, has a larger one."""
    version: int
    """The version of the stored session; 0: none is stored."""
    n_appended: int = 0
    """Tokens, and turns, that were appended since the memory was stored as a whole."""


class Stored(NamedTuple):
    """A session that is stored."""

    name: str
    used: float
    """When it was last used, in seconds since 1970."""
    is_busy: bool = False
    """Whether a request has a lease."""


class MemoryStore:
    """Sessions in the memory of one server, until it stops. Thread-safe.

    Args:
        settings: The limits.
        largest: Bytes that a state may grow to without answers that are kept for their keys.
        clock: Returns the time.
    """

    is_saved = False
    """Whether sessions outlive the server."""

    def __init__(
        self, settings: ServeSettings, largest: int = 0, clock: Callable[[], float] = time.time
    ) -> None:
        self._settings, self._largest, self._clock = settings, largest, clock
        self._used: OrderedDict[str, float] = OrderedDict()
        """When each was last used, in this order."""
        self._versions: dict[str, int] = {}
        self._states: dict[str, State] = {}
        self._busy: set[str] = set()
        self._n_leases = 1
        self._lock = threading.RLock()

    @property
    def n_sessions(self) -> int | None:
        """Number of sessions; None: not known."""
        return len(self._used)

    def all(self, most: int | None = None) -> list[Stored]:
        """Return the sessions, the most recently used first, at most so many."""
        with self._lock:
            return [*map(self.find, reversed(self._used))][:most]

    def find(self, name: str) -> Stored:
        """Return one without its state."""
        with self._lock:
            if name not in self._used and name not in self._busy:
                raise missing(name)
            return Stored(name, self._used.get(name, self._clock()), name in self._busy)

    def acquire(self, name: str) -> Lease:
        """Acquire a session, or the right to create it."""
        with self._lock:
            self._require_free(name)
            if name not in self._used:
                self._require_place(name)
            self._busy.add(name)
            self._n_leases += 1
            return Lease(name, self._n_leases, self._versions.get(name, 0))

    def release(self, lease: Lease) -> None:
        """Give a lease back."""
        with self._lock:
            self._busy.discard(lease.name)
            if lease.name in self._used:
                self._used[lease.name] = self._clock()
                self._used.move_to_end(lease.name)

    def load(self, name: str, known: tuple[int, State] | None = None) -> tuple[int, State]:
        """Return the version of a session and its state."""
        if (version := self._versions.get(name)) is None:
            raise missing(name)
        return known if known and known[0] == version else (version, self._read(name))

    def save(self, lease: Lease, state: State, turn: Turn) -> int:
        """Store the state that a turn led to, release the lease and return the version."""
        try:
            self._write(lease.name, state)
            with self._lock:
                self._versions[lease.name] = lease.number
                self._used[lease.name] = self._clock()
        finally:
            self.release(lease)
        return lease.number

    def delete(self, name: str) -> None:
        """Delete a session."""
        with self._lock:
            self.find(name)
            self._require_free(name)
            self._remove(name)
            del self._used[name], self._versions[name]

    def expire(self, forget: Callable[[str], object]) -> int:
        """Delete those that were not used for ``session_idle`` seconds; return how many.

        ``forget`` is called with the name of each.

        Raises:
            OSError: Some cannot be deleted; the others are.
        """
        before, n_deleted = self._clock() - self._settings.session_idle, 0
        failed: list[OSError] = []
        for name in [each.name for each in self.all() if each.used < before]:
            with self._lock:
                if name in self._busy or self._used.get(name, before) >= before:
                    continue
                try:
                    self.delete(name)
                    forget(name)
                    n_deleted += 1
                except OSError as error:
                    failed.append(error)
        if failed:
            raise OSError(f"{n_deleted} sessions were deleted, {len(failed)} not: {failed[0]}")
        return n_deleted

    def close(self) -> None:
        """Release connections."""

    def _require_free(self, name: str) -> None:
        if name in self._busy:
            message = f"session {name!r} is in use by another request: wait until it has ended"
            raise SessionError("session_busy", message)

    def _require_place(self, name: str) -> None:
        """Require a place for a new session."""
        n, limits = len(self._used.keys() | self._busy), self._settings
        nbytes = max(sum(map(bytes_of, self._states.values())), n * self._largest)
        most = min(limits.max_sessions, limits.sessions_in_memory)
        # There is nowhere to evict them to, and young ones will grow.
        if n >= most or nbytes >= limits.session_bytes:
            full = f"the sessions have {nbytes} bytes when they are full"
            raise too_many(f"there are {n} sessions" if n >= most else full)

    def _read(self, name: str) -> State:
        return self._states[name]

    def _write(self, name: str, state: State) -> None:
        self._states[name] = state

    def _remove(self, name: str) -> None:
        del self._states[name]


class FolderStore(MemoryStore):
    """A folder with a file for each session, of one server. Thread-safe.

    Files are those of :func:`~transformer_xl.inference.generate.write_state`, replaced atomically.
    Only regular files are opened, and no link is followed.

    Args:
        settings: The folder, and the limits.
        weights: The checksum of the weights to which the memories belong.
        model: The model that reads them. None: files are not checked against one.
        clock: Returns the time.

    Raises:
        OSError: The folder cannot be created or read.
    """

    is_saved = True

    def __init__(
        self,
        settings: ServeSettings,
        weights: str,
        model: LanguageModel | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(settings, clock=clock)
        assert settings.folder is not None
        self._folder, self._weights, self._model = settings.folder, weights, model
        self._folder.mkdir(parents=True, exist_ok=True)
        self._used |= sorted(self._files(), key=lambda each: each[1])
        self._versions = dict.fromkeys(self._used, 1)

    def _files(self) -> list[tuple[str, float]]:
        """Return the names of all sessions, and when they were last used."""
        sessions: list[tuple[str, float]] = []
        for part in sorted(self._folder.glob("[0-9a-f][0-9a-f]")):
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
                        sessions.append((name, path.lstat().st_mtime))
            except OSError as error:
                # Deleted meanwhile, or of another user.
                _ignore(part, str(error.strerror))
        return sessions

    def _require_place(self, name: str) -> None:
        n, path = len(self._used.keys() | self._busy), path_of(self._folder, name)
        if n >= self._settings.max_sessions:
            raise too_many(f"there are {n} sessions")
        # Now, and not when the answer is saved.
        if kind := kind_other_than_file(path, follow=False):
            raise NotRegularError(f"{path} is {kind}, and not the file of a session")

    def _read(self, name: str) -> State:
        path = path_of(self._folder, name)
        return load_state(path, self._weights, self._model, follow=False)

    def _write(self, name: str, state: State) -> None:
        path = path_of(self._folder, name)
        if path.parent.is_symlink():
            raise NotRegularError(f"{path.parent} is a symbolic link, and not a folder")
        write_state(path, state, self._weights)

    def _remove(self, name: str) -> None:
        path_of(self._folder, name).unlink(missing_ok=True)


def path_of(folder: Path, name: str) -> Path:
    """Return the file of a session."""
    # Some file systems ignore case; subfolders keep each folder small.
    digest = hashlib.sha256(name.encode()).hexdigest()
    return folder / digest[:2] / f"{name}.{digest[:12]}{_SUFFIX}"


def bytes_of(state: State) -> int:
    """Return the size of a state, with its note."""
    # Views: state_dict() would copy all.
    tensors = *state.mems.tensors, state.mems.forgotten, state.random, state.read
    # Answers that are kept: 256 KB and more.
    return sum(x.nbytes for x in tensors if x is not None) + len(state.note.encode())


def missing(name: str) -> SessionError:
    """Return the error where there is no such session."""
    return SessionError("session_not_found", f"there is no session {name!r}")


def too_many(reached: str) -> SessionError:
    """Return the error where a limit is reached."""
    return SessionError("too_many_sessions", f"{reached}, as many as may be: delete one")


def _ignore(path: Path, why: str) -> None:
    log.warning("ignored in the folder of the sessions: %r: %s", str(path), why)
