"""Sessions: texts whose memory is kept between requests.

A session handles one request at a time. Each is in a store, and each answer is stored before it
ends; what is in memory besides are copies of those that were used last.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_xl.apps.serve.errors import SessionError
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.session_store import (
    FolderStore,
    Lease,
    MemoryStore,
    Stored,
    Turn,
    bytes_of,
)
from transformer_xl.inference.generate import State
from transformer_xl.model import LanguageModel, weights_checksum

_NO_TURN = Turn()


@dataclass(eq=False)
class Session:
    """A text that is continued by one request after another."""

    name: str
    used: float
    """When it was last used, in seconds since 1970."""
    state: State | None = None
    """The state to continue from; None: it is not in memory, or has not begun."""
    nbytes: int = 0
    """Size of the state, with its note."""
    is_saved: bool = False
    """Whether it outlives the server."""
    is_busy: bool = False
    """Whether a request has acquired it."""
    lease: Lease | None = None
    """The right to change it, while it is in use."""


class Sessions:
    """All sessions of a model. Methods may block on the store; they are thread-safe.

    They raise a SessionError where a session is missing or in use or the store is not available,
    OSError where a folder cannot be read or written, RuntimeError where a stored session is
    damaged, and ValueError where it belongs to another model.

    Attributes:
        nbytes: Bytes of the sessions in memory.

    Args:
        settings: The store, and the limits.
        weights: The weights file of the model, to which memories belong.
        model: The model that reads them. None: files are not checked against one.
        largest: Bytes that one may grow to without answers that are kept for their keys.
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
        self._settings = settings
        if settings.is_shared:
            from transformer_xl.apps.serve.redis_store import RedisStore

            assert model is not None
            self._store = RedisStore(settings, checksum, model, largest, run)
        elif settings.folder is not None:
            self._store = FolderStore(settings, checksum, model, clock)
        else:
            self._store = MemoryStore(settings, largest, clock)
        self.nbytes = 0
        self._copies: OrderedDict[str, tuple[int, State, int]] = OrderedDict()
        """The version, the state and its bytes, in the order of last use."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many there are; in a shared store, how many this server has in memory."""
        n = self._store.n_sessions
        return len(self._copies) if n is None else n

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
        return Session(name, time.time(), state, is_busy=True, lease=lease)

    def close(self, session: Session, state: State | None = None, turn: Turn = _NO_TURN) -> None:
        """Release a session, with its new state, to which ``turn`` led; None: unchanged.

        Raises:
            OSError: It cannot be saved; it is as it was.
        """
        assert session.lease is not None
        if state is None:
            self._store.release(session.lease)
            return
        try:
            version = self._store.save(session.lease, state, turn)
        except BaseException:
            # Whatever the store has is loaded by the next request.
            self._drop(session.name)
            raise
        self._keep(session.name, version, state)

    def create(self, name: str, state: State) -> None:
        """Create a session with a state.

        Raises:
            SessionError: There is one of this name, or no capacity for another one.
            OSError: It cannot be saved; then it is not created.
        """
        session = self.open(name)
        if session.state is not None:
            self.close(session)
            message = f"there is a session {name!r}: take another name, or delete it first"
            raise SessionError("session_exists", message, "name")
        self.close(session, state)

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
        """Require that a session is saved, as each is before an answer ends."""
        if not self._store.is_saved:
            message = "sessions are in memory only: start the server with --sessions DIR"
            raise SessionError("session_not_saved", message)
        self._store.find(name)

    def delete(self, name: str) -> None:
        """Delete a session and what is stored of it."""
        self._store.delete(name)
        self._drop(name)

    def expire(self) -> int:
        """Delete those that were not used for ``session_idle`` seconds; return how many.

        Raises:
            OSError: Some cannot be deleted; the others are.
        """
        return self._store.expire(self._drop)

    def close_store(self) -> None:
        """Close the connections of the store; no session is used after that."""
        self._store.close()

    def _load(self, name: str, version: int | None = None) -> State:
        """Return the state of a session, of this version if that is known."""
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
            while self._copies and (
                len(self._copies) > limits.sessions_in_memory or self.nbytes > limits.session_bytes
            ):
                self.nbytes -= self._copies.popitem(last=False)[1][2]

    def _drop(self, name: str) -> None:
        with self._lock:
            if copy := self._copies.pop(name, None):
                self.nbytes -= copy[2]

    def _session(self, stored: Stored) -> Session:
        """Return a stored session, with what is in memory of it."""
        _, state, nbytes = self._copies.get(stored.name, (0, None, 0))
        name, used, is_busy = stored
        return Session(name, used, state, nbytes, self._store.is_saved, is_busy)
