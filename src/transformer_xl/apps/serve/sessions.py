"""Sessions: texts whose memory is kept between requests, in memory and in a store.

A session handles one request at a time. The least recently used ones are evicted from memory to
the store; unused ones expire. What is in memory of a store that several servers share is a copy,
which is compared with the store whenever a session is acquired.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformer_xl.apps.serve.errors import (
    SessionBusyError,
    SessionError,
    SessionExistsError,
    SessionMissingError,
    StorageFullError,
    TooManySessionsError,
)
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.session_store import FolderStore, Lease, SessionStore, Turn
from transformer_xl.inference.generate import State
from transformer_xl.model import LanguageModel
from transformer_xl.model.pretrained import weights_checksum

_NO_TURN = Turn()


@dataclass(eq=False)
class Session:
    """A text that is continued by one request after another."""

    name: str
    used: float
    """When it was last used, in seconds since 1970."""
    state: State | None = None
    """The state to continue from; None: it is in the store, or has not begun."""
    nbytes: int = 0
    """Size of the state, with its note."""
    is_saved: bool = False
    """Whether the store holds the state."""
    version: int = 0
    """The version of the store that it comes from; 0: none is stored."""
    lease: Lease | None = None
    """The right to change it in the store, while it is in use."""
    is_busy: bool = False
    """Whether a request has acquired it."""
    is_moving: bool = False
    """Whether it is being loaded or saved."""


class Sessions:
    """All sessions of a model. Methods may block on the store; they are thread-safe.

    Attributes:
        nbytes: Bytes of the sessions in memory.

    Args:
        settings: The store, and the limits.
        weights: The weights file of the model, to which memories belong.
        model: The model that reads them. None: files are not checked against one.
        largest: Bytes that one may grow to without answers that are kept for their keys; without a
            store, each counts as many.
        clock: Returns the time.
        run: Calls a function that uses the model, in the thread that owns it.

    Raises:
        OSError: The store cannot be created or read, or the weights file cannot be read.
        RuntimeError: A package for the store is missing.
        ValueError: The store cannot hold sessions of this model.
    """

    def __init__(
        self,
        settings: ServeSettings,
        weights: Path,
        model: LanguageModel | None = None,
        *,
        largest: int = 0,
        clock: Callable[[], float] = time.time,
        run: Callable[[Callable[[], Any]], Any] = lambda function: function(),
    ) -> None:
        # At the start: while the server runs, another model may be written to this folder.
        checksum = weights_checksum(weights)
        self._settings, self._largest, self._clock = settings, largest, clock
        self._store: SessionStore | None = None
        if settings.is_shared:
            from transformer_xl.apps.serve.redis_store import RedisStore

            assert model is not None
            self._store = RedisStore(settings, checksum, model, largest, run)
        elif settings.folder is not None:
            self._store = FolderStore(settings.folder, checksum, model)
        self._lock = threading.Condition()
        # Both in the order of last use; the second has those in memory.
        self._all: dict[str, Session] = {}
        self._held: dict[str, Session] = {}
        # Counted: sums over all sessions would delay every request. The second is the number of
        # acquired sessions whose state is not in memory yet.
        self.nbytes = self._n_coming = 0
        if self._store and not self._is_shared:
            found = reversed(self._store.all())
            self._all = {
                name: Session(name, used, is_saved=True, version=1) for name, used, _ in found
            }

    def __len__(self) -> int:
        """Return how many there are; in a shared store, how many this server has in memory."""
        return len(self._all)

    @property
    def _is_shared(self) -> bool:
        return self._store is not None and self._store.is_shared

    @property
    def n_in_memory(self) -> int:
        """Number of sessions in memory."""
        return len(self._held)

    def open(self, name: str) -> Session:
        """Acquire a session for a request, or create it; :meth:`close` releases it.

        Raises:
            SessionError: It is in use, or there is no capacity for another one.
            RuntimeError, ValueError, OSError: As a :class:`SessionStore`.
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
            if self._store:
                session.lease = self._store.acquire(name, session.version)
                self._follow(session, session.lease.version)
                if session.state is None and session.is_saved:
                    self._load(session)
        except BaseException:
            self._release(session)
            raise
        return session

    def create(self, name: str, state: State) -> None:
        """Create a session with a state.

        Raises:
            SessionError: There is one of this name, or no capacity for another one.
            OSError: It cannot be saved; then it is not created.
        """
        session = self.open(name)
        if session.state is not None:
            self.close(session)
            raise SessionExistsError(
                f"there is a session {name!r}: take another name, or delete it first"
            )
        try:
            self.close(session, state)
        except OSError:
            self.delete(name)
            raise

    def is_at_hand(self, name: str) -> bool:
        """Whether :meth:`open` would not block on the store."""
        session = self._all.get(name)
        if self._is_shared:
            return session is not None and session.is_busy
        if session is None:
            return not self._exceeds_limits()
        return not session.is_moving and (session.state is not None or session.is_busy)

    def close(self, session: Session, state: State | None = None, turn: Turn = _NO_TURN) -> None:
        """Release a session, with its new state, to which ``turn`` led; None: unchanged.

        Raises:
            OSError: It cannot be saved; it stays in memory.
            SessionError: It cannot be saved in a shared store; it is as it was.
        """
        try:
            if state is not None:
                self._set_state(session, state)
                session.is_saved = False
                if self._store and self._settings.save == "answer":
                    self._save(session, turn)
        except BaseException:
            if self._is_shared:
                # The next request loads what the store has.
                self._set_state(session, None)
                session.version = 0
            raise
        finally:
            self._release(session)
            self._evict()

    def peek(self, name: str) -> State:
        """Return the state of a session without acquiring it, even while it is in use.

        Raises:
            SessionError: It does not exist, or has not begun.
            RuntimeError, ValueError, OSError: As a :class:`SessionStore`.
        """
        if self._store and self._is_shared:
            with self._lock:
                session = self._after_move(name)
                known = None
                if session and session.state is not None and not session.is_busy:
                    known = session.version, session.state
            return self._store.load(name, known)[1]
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

    def all(self, most: int | None = None) -> list[Session]:
        """Return all, the most recently used first, or at most so many of them.

        Raises:
            SessionError: A shared store does not answer.
        """
        if self._store and self._is_shared:
            return [self._seen(*stored) for stored in self._store.all(most)]
        return self._known()[:most]

    def find(self, name: str) -> Session:
        """Return a session without loading it.

        Raises:
            SessionError: It does not exist, or a shared store does not answer.
        """
        if self._store and self._is_shared:
            return self._seen(*self._store.find(name))
        # The lock: a session that is acquired or released is taken out and put in again.
        with self._lock:
            if name not in self._all:
                raise SessionMissingError(f"there is no session {name!r}")
            return self._all[name]

    def save(self, name: str) -> None:
        """Save a session now.

        Raises:
            SessionError: It does not exist or is in use, or there is no folder.
            OSError: It cannot be saved.
        """
        if not self._store:
            raise SessionError("sessions are in memory only: start the server with --sessions DIR")
        if self._is_shared:
            # Each answer was saved before it ended.
            self.find(name)
            return
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
        for session in self._known() if self._store else []:
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
        if self._store and self._is_shared:
            # Not under the lock, as it may take long; a lease keeps others from it meanwhile.
            self._store.delete(name)
            return
        with self._lock:
            session = self._existing(name)
            _require_free(session)
            self._remove(session)

    def close_store(self) -> None:
        """Release what the store holds; no session is used after that."""
        if self._store:
            self._store.close()

    def expire(self) -> int:
        """Delete those that were not used for ``idle`` seconds; return how many.

        A shared store does so by itself.

        Raises:
            OSError: Some cannot be deleted; the others are.
        """
        before, gone = self._clock() - self._settings.session_idle, 0
        failed: list[OSError] = []
        if self._is_shared:
            return 0
        for session in [each for each in self._known() if each.used < before]:
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
        if not self._store:
            # There is nowhere to evict them to, and young ones will grow.
            most, nbytes = min(most, limits.sessions_in_memory), max(self.nbytes, n * self._largest)
        # The sessions of a shared store are counted there.
        if not self._is_shared and (n >= most or nbytes >= limits.session_bytes):
            full = f"the sessions have {nbytes} bytes when they are full"
            reached = f"there are {n} sessions" if n >= most else full
            raise TooManySessionsError(f"{reached}, as many as may be: delete one")
        self._all[name] = Session(name, self._clock())
        return self._all[name]

    def _remove(self, session: Session) -> None:
        if self._store:
            self._store.delete(session.name)
        self._set_state(session, None)
        self._all.pop(session.name, None)

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
        # Kept answers: 256 KB and more.
        nbytes += 0 if state is None else len(state.note.encode())
        with self._lock:
            if session.is_busy:
                self._n_coming += (state is None) - (session.state is None)
            self.nbytes += nbytes - session.nbytes
            session.state, session.nbytes = state, nbytes
            self._held.pop(session.name, None)
            if state is not None:
                self._held[session.name] = session

    def _release(self, session: Session) -> None:
        lease, session.lease = session.lease, None
        if self._store and lease:
            self._store.release(lease)
        with self._lock:
            self._n_coming -= session.state is None
            session.is_busy, session.used = False, self._clock()
            self._all.pop(session.name, None)
            # A session that never got a state is not kept, nor one that only a shared store has.
            if session.state is not None or (session.is_saved and not self._is_shared):
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
        """Evict the least recently used to the store, if there is one, until the limits hold.

        Returns:
            The error that kept them from being saved; None if the limits hold or all are in use.
        """
        failed: OSError | None = None
        while self._store and self._exceeds_limits():
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
                    if self._is_shared:
                        self._all.pop(session.name, None)
            except OSError as error:
                # It stays in memory.
                failed = error
        return None

    def _save(self, session: Session, turn: Turn = _NO_TURN) -> None:
        assert session.state is not None
        assert self._store is not None
        lease, session.lease = session.lease or Lease(session.name), None
        session.version = self._store.save(lease, session.state, turn)
        session.is_saved = True

    def _load(self, session: Session) -> State:
        assert self._store is not None
        known = None if session.state is None else (session.version, session.state)
        session.version, state = self._store.load(session.name, known)
        self._set_state(session, state)
        return state

    def _follow(self, session: Session, version: int) -> None:
        """Bring an acquired session to the version of the store, if another server changed it."""
        if version == session.version:
            return
        session.is_saved = bool(version)
        if not version:
            self._set_state(session, None)
            session.version = 0
        elif session.state is not None:
            self._load(session)

    def _known(self) -> list[Session]:
        """Return those that this server knows, the most recently used first."""
        with self._lock:
            return [*reversed(self._all.values())]

    def _seen(self, name: str, used: float, is_busy: bool) -> Session:
        """Return a session of a shared store, with what this server has of it."""
        own = self._all.get(name) or Session(name, used)
        return replace(own, used=used, is_saved=True, is_busy=is_busy, lease=None)


def _require_free(session: Session) -> None:
    if session.is_busy:
        raise SessionBusyError(
            f"session {session.name!r} is in use by another request: wait until it has ended"
        )
