"""Sessions: texts whose memory is kept between requests, in memory and in files.

A session handles one request at a time. The least recently used ones are evicted from memory to
the disk; unused ones expire. Files are those of :mod:`transformer_xl.inference.generate.session`,
replaced atomically.
"""

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformer_xl.apps.serve.errors import (
    SessionBusyError,
    SessionError,
    SessionMissingError,
    StorageFullError,
    TooManySessionsError,
)
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.config.files import NotRegularError, kind_other_than_file
from transformer_xl.inference.generate import State, load_state, write_state
from transformer_xl.model import LanguageModel
from transformer_xl.model.pretrained import weights_checksum

log = logging.getLogger("transformer_xl.serve")

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""The pattern of a name."""
_SUFFIX = ".safetensors"


@dataclass(eq=False)
class Session:
    """A text that is continued by one request after another."""

    name: str
    used: float
    """When it was last used, in seconds since 1970."""
    state: State | None = None
    """The state to continue from; None: it is on the disk, or has not begun."""
    nbytes: int = 0
    """Size of the state."""
    is_saved: bool = False
    """Whether the file holds the state."""
    is_busy: bool = False
    """Whether a request has acquired it."""
    is_moving: bool = False
    """Whether it is being loaded or saved."""


def is_name(name: str) -> bool:
    """Whether a session can have this name."""
    return bool(re.fullmatch(NAME, name))


def path_of(folder: Path, name: str) -> Path:
    """Return the file of a session."""
    # Some file systems ignore case; subfolders keep each folder small.
    digest = hashlib.sha256(name.encode()).hexdigest()
    return folder / digest[:2] / f"{name}.{digest[:12]}{_SUFFIX}"


def saved_sessions(folder: Path) -> Iterator[Session]:
    """Find the sessions that are saved in a folder; regular files alone, and no link is followed.

    Raises:
        OSError: The folder cannot be read.
    """
    for part in sorted(folder.iterdir()):
        if not re.fullmatch("[0-9a-f]{2}", part.name):
            continue
        try:
            if (kind := kind_other_than_file(part, follow=False)) != "a folder":
                log.warning("ignored in the folder of the sessions: %r is %s", str(part), kind)
                continue
            for path in part.iterdir():
                name = path.name.removesuffix(_SUFFIX).rpartition(".")[0]
                if not is_name(name) or path != path_of(folder, name):
                    continue
                if kind := kind_other_than_file(path, follow=False):
                    log.warning("ignored in the folder of the sessions: %r is %s", str(path), kind)
                else:
                    yield Session(name, path.lstat().st_mtime, is_saved=True)
        except OSError as error:
            # Deleted meanwhile, or of another user.
            log.warning("ignored in the folder of the sessions: %r: %s", str(part), error.strerror)


class Sessions:
    """All sessions of a model. Methods may block on the disk; they are thread-safe.

    Attributes:
        nbytes: Bytes of the sessions in memory.

    Args:
        settings: The folder, and the limits.
        weights: The weights file of the model, to which memories belong.
        model: The model that reads them. None: files are not checked against one.
        largest: Bytes that one may grow to; without a folder, each counts as many.
        clock: Returns the time.

    Raises:
        OSError: The folder cannot be created or read, or the weights file cannot be read.
    """

    def __init__(
        self,
        settings: ServeSettings,
        weights: Path,
        model: LanguageModel | None = None,
        *,
        largest: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        # At the start: while the server runs, another model may be written to this folder.
        self._weights, self._model = weights_checksum(weights), model
        self._settings, self._folder = settings, settings.sessions
        self._largest, self._clock = largest, clock
        self._lock = threading.Condition()
        # Both in the order of last use; the second has those in memory.
        self._all: dict[str, Session] = {}
        self._held: dict[str, Session] = {}
        # Counted: sums over all sessions would delay every request. The second is the number of
        # acquired sessions whose state is not in memory yet.
        self.nbytes = self._n_coming = 0
        if self._folder:
            self._folder.mkdir(parents=True, exist_ok=True)
            found = sorted(saved_sessions(self._folder), key=lambda session: session.used)
            self._all = {session.name: session for session in found}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def n_in_memory(self) -> int:
        """Number of sessions in memory."""
        return len(self._held)

    def open(self, name: str) -> Session:
        """Acquire a session for a request, or create it; :meth:`close` releases it.

        Raises:
            SessionError: It is in use, or there is no capacity for another one.
            RuntimeError, ValueError, OSError: As :func:`load_state`.
        """
        session = self._all.get(name)
        will_load = session is None or (session.state is None and not session.is_busy)
        if will_load and (error := self._evict()):
            raise StorageFullError(
                f"{len(self._held)} sessions in memory, as many as may be, and not all of them can "
                f"be saved ({error}): free space on the disk of the server, or delete sessions"
            )
        with self._lock:
            session = self._after_move(name) or self._created(name)
            _require_free(session)
            session.is_busy = True
            self._n_coming += session.state is None
            # Keep the order of last use.
            self._all[name] = self._all.pop(name)
        try:
            if session.state is None and session.is_saved:
                self._load(session)
        except BaseException:
            self._release(session)
            raise
        return session

    def is_at_hand(self, name: str) -> bool:
        """Whether :meth:`open` would not block on the disk."""
        session = self._all.get(name)
        if session is None:
            return not self._exceeds_limits()
        return not session.is_moving and (session.state is not None or session.is_busy)

    def close(self, session: Session, state: State | None = None) -> None:
        """Release a session, with its new state; None: unchanged.

        Raises:
            OSError: It cannot be saved; it stays in memory.
        """
        try:
            if state is not None:
                self._set_state(session, state)
                session.is_saved = False
                if self._folder and self._settings.save == "answer":
                    self._save(session)
        finally:
            self._release(session)
            self._evict()

    def peek(self, name: str) -> State:
        """Return the state of a session without acquiring it, even while it is in use.

        Raises:
            SessionError: It does not exist, or has not begun.
            RuntimeError, ValueError, OSError: As :func:`load_state`.
        """
        with self._lock:
            session = self._existing(name)
            if session.state is not None:
                return session.state
            if not session.is_saved:
                raise SessionMissingError(f"session {name!r} has just begun and has no state yet")
            _require_free(session)
            session.is_moving = True
        with self._moving(session):
            state = self._load(session)
        self._evict()
        return state

    def all(self) -> list[Session]:
        """Return all, the most recently used first."""
        with self._lock:
            return [*reversed(self._all.values())]

    def find(self, name: str) -> Session:
        """Return a session without loading it.

        Raises:
            SessionMissingError: It does not exist.
        """
        if name not in self._all:
            raise SessionMissingError(f"there is no session {name!r}")
        return self._all[name]

    def save(self, name: str) -> None:
        """Save a session now.

        Raises:
            SessionError: It does not exist or is in use, or there is no folder.
            OSError: It cannot be saved.
        """
        if not self._folder:
            raise SessionError("sessions are in memory only: start the server with --sessions DIR")
        with self._lock:
            session = self._existing(name)
            _require_free(session)
            session.is_moving = True
        with self._moving(session):
            if not session.is_saved:
                self._save(session)

    def save_all(self) -> int:
        """Save all that have changed and are not in use; return how many saves failed.

        A failed save does not keep the others from being saved.
        """
        failed = 0
        for session in self.all() if self._folder else []:
            try:
                if session.state is not None and not session.is_saved:
                    self.save(session.name)
            except Exception:  # noqa: BLE001  (the others are saved)
                failed += 1
        return failed

    def delete(self, name: str) -> None:
        """Delete a session and its file.

        Raises:
            SessionError: It does not exist or is in use.
            OSError: The file cannot be deleted.
        """
        with self._lock:
            session = self._existing(name)
            _require_free(session)
            self._remove(session)

    def expire(self) -> int:
        """Delete those that were not used for ``idle`` seconds; return how many.

        Raises:
            OSError: Some cannot be deleted; the others are.
        """
        before, gone = self._clock() - self._settings.session_idle, 0
        failed: list[OSError] = []
        for session in [each for each in self.all() if each.used < before]:
            with self._lock:
                # It may have been deleted or used meanwhile.
                is_there = self._after_move(session.name) is session
                if not is_there or session.used >= before or session.is_busy:
                    continue
                try:
                    self._remove(session)
                    gone += 1
                except OSError as error:
                    failed.append(error)
        if failed:
            raise OSError(f"{gone} sessions were deleted, {len(failed)} not: {failed[0]}")
        return gone

    def _created(self, name: str) -> Session:
        n, limits = len(self._all), self._settings
        most, nbytes = limits.max_sessions, 0
        if self._folder:
            # Something else may have its place. Found now, and not when the answer is saved.
            path = path_of(self._folder, name)
            if kind := kind_other_than_file(path, follow=False):
                raise NotRegularError(f"{path} is {kind}, and not the file of a session")
        if not self._folder:
            # There is nowhere to evict them to, and young ones will grow.
            most, nbytes = min(most, limits.sessions_in_memory), max(self.nbytes, n * self._largest)
        if n >= most or nbytes >= limits.session_bytes:
            full = f"the sessions have {nbytes} bytes when they are full"
            reached = f"there are {n} sessions" if n >= most else full
            raise TooManySessionsError(f"{reached}, as many as may be: delete one")
        self._all[name] = Session(name, self._clock())
        return self._all[name]

    def _remove(self, session: Session) -> None:
        if self._folder:
            path_of(self._folder, session.name).unlink(missing_ok=True)
        self._set_state(session, None)
        del self._all[session.name]

    def _existing(self, name: str) -> Session:
        self._after_move(name)
        return self.find(name)

    def _after_move(self, name: str) -> Session | None:
        """Find a session; wait while it moves."""
        while (session := self._all.get(name)) and session.is_moving:
            self._lock.wait()
        return session

    @contextmanager
    def _moving(self, session: Session) -> Iterator[None]:
        """Let other callers go on once a session is loaded or saved."""
        try:
            yield
        finally:
            with self._lock:
                session.is_moving = False
                self._lock.notify_all()

    def _set_state(self, session: Session, state: State | None) -> None:
        """Set the state in memory, or drop it; update the byte counts."""
        tensors = ()
        if state is not None:
            # Views: state_dict() would copy all.
            tensors = *state.mems.tensors, state.mems.forgotten, state.random, state.read
        nbytes = sum(x.nbytes for x in tensors if x is not None)
        with self._lock:
            if session.is_busy:
                self._n_coming += (state is None) - (session.state is None)
            self.nbytes += nbytes - session.nbytes
            session.state, session.nbytes = state, nbytes
            self._held.pop(session.name, None)
            if state is not None:
                self._held[session.name] = session

    def _release(self, session: Session) -> None:
        with self._lock:
            self._n_coming -= session.state is None
            session.is_busy, session.used = False, self._clock()
            self._all.pop(session.name, None)
            # A session that never got a state is not kept.
            if session.state is not None or session.is_saved:
                self._all[session.name] = session
            if session.state is not None:
                self._held[session.name] = self._held.pop(session.name)

    def _exceeds_limits(self) -> bool:
        """Whether the sessions in memory and those being loaded exceed a limit."""
        with self._lock:
            n = len(self._held) + self._n_coming
            nbytes = self.nbytes + self._n_coming * self._largest
            limits = self._settings
            return n > limits.sessions_in_memory or nbytes > limits.session_bytes

    def _evict(self) -> OSError | None:
        """Evict the least recently used to the disk, if there is one, until the limits hold.

        Returns:
            The error that kept them from being saved; None if the limits hold or all are in use.
        """
        failed: OSError | None = None
        while self._folder and self._exceeds_limits():
            with self._lock:
                free = (s for s in self._held.values() if not (s.is_busy or s.is_moving))
                # After a failed save the next ones would fail too.
                session = next((s for s in free if s.is_saved or failed is None), None)
                if session is None:
                    return failed
                session.is_moving = True
            try:
                with self._moving(session):
                    if not session.is_saved:
                        self._save(session)
                    self._set_state(session, None)
            except OSError as error:
                # It stays in memory.
                failed = error
        return None

    def _save(self, session: Session) -> None:
        assert session.state is not None
        assert self._folder is not None
        path = path_of(self._folder, session.name)
        if path.parent.is_symlink():
            raise NotRegularError(f"{path.parent} is a symbolic link, and not a folder")
        write_state(path, session.state, self._weights)
        session.is_saved = True

    def _load(self, session: Session) -> State:
        assert self._folder is not None
        path = path_of(self._folder, session.name)
        state = load_state(path, self._weights, self._model, follow=False)
        self._set_state(session, state)
        return state


def _require_free(session: Session) -> None:
    if session.is_busy:
        raise SessionBusyError(
            f"session {session.name!r} is in use by another request: wait until it has ended"
        )
