"""Sessions: texts whose memory is kept between requests.

A session handles one request at a time. :class:`Sessions` are those of one server, in memory and
in a folder; :class:`SharedSessions` those of all servers with one Redis.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl.apps.serve.errors import SessionError
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.session_store import FolderStore, Stored, Turn
from transformer_xl.inference.generate import State
from transformer_xl.model import LanguageModel
from transformer_xl.model.pretrained import weights_checksum

if TYPE_CHECKING:
    from transformer_xl.apps.serve.redis_store import Lease


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
    is_busy: bool = False
    """Whether a request has acquired it."""
    lease: "Lease | None" = None
    """The right to change it in a shared store, while it is in use."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while it is acquired, loaded, saved or deleted."""


class Sessions:
    """The sessions of one server. The least recently used are evicted from memory to a folder.

    Methods may block on the disk; they are thread-safe. They raise a SessionError where a session
    is missing or in use, OSError where the folder cannot be read or written, RuntimeError where a
    stored session is damaged, and ValueError where it belongs to another model.

    Attributes:
        nbytes: Bytes of the sessions in memory.

    Args:
        settings: The folder, and the limits.
        weights: The weights file of the model, to which memories belong.
        model: The model that reads them. None: files are not checked against one.
        largest: Bytes that one may grow to without answers that are kept for their keys; without a
            folder, each counts as many.
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
        self._settings, self._largest, self._clock = settings, largest, clock
        self._store: FolderStore | None = None
        self.nbytes = 0
        # Both in the order of last use; the second has those in memory.
        self._all: OrderedDict[str, Session] = OrderedDict()
        self._held: OrderedDict[str, Session] = OrderedDict()
        self._coming: set[Session] = set()
        """Acquired sessions whose state is not in memory yet."""
        # Of the three, and of the flags of sessions. Taken after the lock of a session.
        self._lock = threading.Lock()
        if settings.folder is not None:
            # At the start: while the server runs, another model may be written to this folder.
            self._store = FolderStore(settings.folder, weights_checksum(weights), model)
            for name, used, _ in self._store.all():
                self._all[name] = Session(name, used, is_saved=True)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def n_in_memory(self) -> int:
        """Number of sessions in memory."""
        return len(self._held)

    def open(self, name: str) -> Session:
        """Acquire a session for a request, or create it; :meth:`close` releases it."""
        session = self._all.get(name)
        will_load = session is None or (session.state is None and not session.is_busy)
        if will_load and (error := self._evict()):
            message = (
                f"{len(self._held)} sessions in memory, as many as may be, and not all of them can "
                f"be saved ({error}): free space on the disk of the server, or delete sessions"
            )
            raise SessionError("no_room", message)
        with self._free(name, creates=True) as session, self._lock:
            session.is_busy = True
            self._all.move_to_end(name)
            if session.state is None:
                self._coming.add(session)
        try:
            if self._store and session.state is None and session.is_saved:
                self._load(session)
            elif self._store and session.state is None:
                # Now, and not when the answer is saved.
                self._store.require_free(name)
        except BaseException:
            self._release(session)
            raise
        return session

    def close(self, session: Session, state: State | None = None, turn: Turn = _NO_TURN) -> None:
        """Release a session, with its new state, to which ``turn`` led; None: unchanged."""
        try:
            if state is not None:
                self._set_state(session, state)
                session.is_saved = False
                if self._settings.save == "answer":
                    self._save(session)
        finally:
            self._release(session)
            self._evict()

    def peek(self, name: str) -> State:
        """Return the state of a session without acquiring it, even while it is in use."""
        session = self.find(name)
        if (state := session.state) is not None:
            return state
        if not session.is_saved:
            message = f"session {name!r} has just begun and has no state yet"
            raise SessionError("session_not_found", message)
        with self._free(name) as session:
            state = session.state or self._load(session)
        self._evict()
        return state

    def all(self, most: int | None = None) -> list[Session]:
        """Return all, the most recently used first, or at most so many of them."""
        with self._lock:
            return [*reversed(self._all.values())][:most]

    def find(self, name: str) -> Session:
        """Return a session without loading it."""
        if (session := self._all.get(name)) is None:
            raise SessionError("session_not_found", f"there is no session {name!r}")
        return session

    def save(self, name: str) -> None:
        """Save a session now."""
        if not self._store:
            message = "sessions are in memory only: start the server with --sessions DIR"
            raise SessionError("session_not_saved", message)
        with self._free(name) as session:
            self._save(session)

    def stop(self) -> int:
        """Save all that have changed and are not in use; return how many saves failed."""
        failed = 0
        for session in self.all() if self._store else []:
            try:
                if not session.is_saved:
                    self.save(session.name)
            except Exception:  # noqa: BLE001  (the others are saved)
                failed += 1
        return failed

    def delete(self, name: str) -> None:
        """Delete a session and what is stored of it."""
        with self._free(name) as session:
            self._remove(session)

    def expire(self) -> int:
        """Delete those that were not used for ``session_idle`` seconds; return how many.

        Raises:
            OSError: Some cannot be deleted; the others are.
        """
        before, n_deleted = self._clock() - self._settings.session_idle, 0
        failed: list[OSError] = []
        for each in [each for each in self.all() if each.used < before]:
            try:
                with self._free(each.name) as session:
                    if session.used < before:
                        self._remove(session)
                        n_deleted += 1
            except SessionError:
                # It was deleted or acquired meanwhile.
                continue
            except OSError as error:
                failed.append(error)
        if failed:
            raise OSError(f"{n_deleted} sessions were deleted, {len(failed)} not: {failed[0]}")
        return n_deleted

    @contextmanager
    def _free(self, name: str, *, creates: bool = False) -> Iterator[Session]:
        """Hold the lock of a session that no request uses."""
        while True:
            with self._lock:
                session = self._all.get(name) or (self._create(name) if creates else None)
            session = session or self.find(name)
            with session.lock:
                with self._lock:
                    is_known, is_busy = self._all.get(name) is session, session.is_busy
                # Else it was deleted while this waited for its lock.
                if is_known:
                    if is_busy:
                        message = f"session {name!r} is in use by another request: wait until it "
                        raise SessionError("session_busy", message + "has ended")
                    yield session
                    return

    def _create(self, name: str) -> Session:
        n, limits = len(self._all), self._settings
        most, nbytes = limits.max_sessions, 0
        if not self._store:
            # There is nowhere to evict them to, and young ones will grow.
            most, nbytes = min(most, limits.sessions_in_memory), max(self.nbytes, n * self._largest)
        if n >= most or nbytes >= limits.session_bytes:
            full = f"the sessions have {nbytes} bytes when they are full"
            reached = f"there are {n} sessions" if n >= most else full
            raise SessionError("too_many_sessions", f"{reached}, as many as may be: delete one")
        self._all[name] = Session(name, self._clock())
        return self._all[name]

    def _remove(self, session: Session) -> None:
        if self._store:
            self._store.delete(session.name)
        self._set_state(session, None)
        with self._lock:
            self._all.pop(session.name, None)

    def _set_state(self, session: Session, state: State | None) -> None:
        """Set the state in memory, or drop it; update the byte counts."""
        nbytes = bytes_of(state)
        with self._lock:
            self.nbytes += nbytes - session.nbytes
            session.state, session.nbytes = state, nbytes
            self._held.pop(session.name, None)
            if state is not None:
                self._held[session.name] = session
                self._coming.discard(session)

    def _release(self, session: Session) -> None:
        with self._lock:
            self._coming.discard(session)
            session.is_busy, session.used = False, self._clock()
            if session.state is not None:
                self._held.move_to_end(session.name)
            elif not session.is_saved:
                # It never got a state.
                del self._all[session.name]
                return
            self._all.move_to_end(session.name)

    def _exceeds_limits(self) -> bool:
        """Whether the sessions in memory and those being loaded exceed a limit."""
        n_coming, limits = len(self._coming), self._settings
        nbytes = self.nbytes + n_coming * self._largest
        n = len(self._held) + n_coming
        return n > limits.sessions_in_memory or nbytes > limits.session_bytes

    def _evict(self) -> OSError | None:
        """Evict the least recently used to the folder, if there is one, until the limits hold.

        Returns:
            The error that kept them from being saved; None if the limits hold or all are in use.
        """
        failed: OSError | None = None
        while self._store and self._exceeds_limits():
            with self._lock:
                # After a failed save the next ones would fail too.
                free = (s for s in self._held.values() if s.is_saved or failed is None)
                free = (s for s in free if not s.is_busy and s.lock.acquire(blocking=False))
                session = next(free, None)
            if session is None:
                return failed
            try:
                if not session.is_busy:
                    self._save(session)
                    self._set_state(session, None)
            except OSError as error:
                # It stays in memory.
                failed = error
            finally:
                session.lock.release()
        return None

    def _save(self, session: Session) -> None:
        if self._store and session.state is not None and not session.is_saved:
            self._store.save(session.name, session.state)
            session.is_saved = True

    def _load(self, session: Session) -> State:
        assert self._store is not None
        state = self._store.load(session.name)
        self._set_state(session, state)
        return state


class SharedSessions:
    """The sessions of all servers with one Redis; what is in memory are copies.

    A copy is compared with the store whenever its session is acquired. Attributes, methods and
    errors are those of :class:`Sessions`; a SessionError tells where the store is not available.

    Args:
        settings: The store, and the limits.
        weights: The weights file of the model, to which memories belong.
        model: The model that reads them.
        largest: As for :class:`Sessions`.
        run: Calls a function that uses the model, in the thread that owns it.

    Raises:
        OSError: The store cannot be reached, or the weights file cannot be read.
        RuntimeError: The package redis is missing.
        ValueError: The store cannot hold sessions of this model.
    """

    def __init__(
        self,
        settings: ServeSettings,
        weights: Path,
        model: LanguageModel,
        *,
        largest: int = 0,
        run: Callable[[Callable[[], Any]], Any] = lambda function: function(),
    ) -> None:
        from transformer_xl.apps.serve.redis_store import RedisStore

        self._settings = settings
        self._store = RedisStore(settings, weights_checksum(weights), model, largest, run)
        self._copies: OrderedDict[str, tuple[int, State, int]] = OrderedDict()
        """The version, the state and its bytes, in the order of last use."""
        self.nbytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def n_in_memory(self) -> int:
        """Number of sessions in memory."""
        return len(self._copies)

    def open(self, name: str) -> Session:
        """Acquire a session for a request, or create it; :meth:`close` releases it."""
        lease = self._store.acquire(name)
        try:
            state = self._load(name, lease.version) if lease.version else None
        except BaseException:
            self._store.release(lease)
            raise
        return Session(name, time.time(), state, lease=lease)

    def close(self, session: Session, state: State | None = None, turn: Turn = _NO_TURN) -> None:
        """Release a session, with its new state, to which ``turn`` led; None: unchanged."""
        assert session.lease is not None
        if state is None:
            self._store.release(session.lease)
            return
        try:
            self._keep(session.name, self._store.save(session.lease, state, turn), state)
        except BaseException:
            # The next request loads what the store has.
            self._drop(session.name)
            raise

    def peek(self, name: str) -> State:
        """Return the state of a session without acquiring it, even while it is in use."""
        return self._load(name)

    def find(self, name: str) -> Session:
        """Return a session without loading it."""
        return self._session(self._store.find(name))

    def all(self, most: int | None = None) -> list[Session]:
        """Return all, the most recently used first, or at most so many of them."""
        return [*map(self._session, self._store.all(most))]

    def save(self, name: str) -> None:
        """Do nothing for a session that exists: each answer was saved before it ended."""
        self._store.find(name)

    def delete(self, name: str) -> None:
        """Delete a session and what is stored of it."""
        self._store.delete(name)
        self._drop(name)

    def expire(self) -> int:
        """Do nothing: the store deletes those that were not used."""
        return 0

    def stop(self) -> int:
        """Close the connections to the store, which has all sessions."""
        self._store.close()
        return 0

    def _load(self, name: str, version: int | None = None) -> State:
        """Return the state of a session, of this version if it is known."""
        with self._lock:
            copy = self._copies.get(name)
        if not (copy and copy[0] == version):
            copy = self._store.load(name, copy and copy[:2])
        self._keep(name, *copy[:2])
        return copy[1]

    def _keep(self, name: str, version: int, state: State) -> None:
        """Keep a copy; drop the least recently used ones until the limits hold."""
        self._drop(name)
        nbytes, limits = bytes_of(state), self._settings
        with self._lock:
            self._copies[name] = version, state, nbytes
            self.nbytes += nbytes
            while len(self._copies) > limits.sessions_in_memory or (
                self.nbytes > limits.session_bytes and self._copies
            ):
                self.nbytes -= self._copies.popitem(last=False)[1][2]

    def _drop(self, name: str) -> None:
        with self._lock:
            if copy := self._copies.pop(name, None):
                self.nbytes -= copy[2]

    def _session(self, stored: Stored) -> Session:
        """Return a stored session, with what this server has of it."""
        _, state, nbytes = self._copies.get(stored.name, (0, None, 0))
        return Session(*stored[:2], state, nbytes, is_saved=True, is_busy=stored.is_busy)


def create(sessions: Sessions | SharedSessions, name: str, state: State) -> None:
    """Create a session with a state.

    Raises:
        SessionError: There is one of this name, or no capacity for another one.
        OSError: It cannot be saved; then it is not created.
    """
    session = sessions.open(name)
    if session.state is not None:
        sessions.close(session)
        message = f"there is a session {name!r}: take another name, or delete it first"
        raise SessionError("session_exists", message, "name")
    try:
        sessions.close(session, state)
    except OSError:
        sessions.delete(name)
        raise


def bytes_of(state: State | None) -> int:
    """Return the size of a state, with its note."""
    if state is None:
        return 0
    # Views: state_dict() would copy all.
    tensors = *state.mems.tensors, state.mems.forgotten, state.random, state.read
    # Answers that are kept: 256 KB and more.
    return sum(x.nbytes for x in tensors if x is not None) + len(state.note.encode())
