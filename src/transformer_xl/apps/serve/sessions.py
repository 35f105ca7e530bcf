"""Sessions: texts whose memory is kept between requests.

A session handles one request at a time. With a folder, each answer is saved before it ends, and
the states in memory are copies of those that were used last.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from transformer_xl.apps.serve.errors import SessionError
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.session_store import SessionFolder
from transformer_xl.inference.generate import State
from transformer_xl.model import LanguageModel, weights_checksum


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
    is_busy: bool = False
    """Whether a request has acquired it."""


class Sessions:
    """All sessions of a model. Methods may block on the disk; they are thread-safe.

    They raise a SessionError where a session is missing or in use, OSError where a file cannot be
    read or written, CheckpointError where it is damaged, and InputError where it belongs to another
    model.

    Attributes:
        nbytes: Bytes of the sessions in memory.

    Args:
        settings: The folder, and the limits.
        weights: The weights file of the model, to which memories belong.
        model: The model that reads them. None: files are not checked against one.
        largest: Bytes that one may grow to without answers that are kept for their keys.
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
        checksum = weights_checksum(weights)
        self._settings, self._largest, self._clock = settings, largest, clock
        self._folder: SessionFolder | None = None
        if settings.folder is not None:
            self._folder = SessionFolder(settings.folder, checksum, model)
        self.nbytes = 0
        self._used = OrderedDict(self._folder.used() if self._folder else {})
        """When each was last used, in this order."""
        self._states: OrderedDict[str, tuple[State, int]] = OrderedDict()
        """The states in memory, with their bytes, in the order of last use."""
        self._busy: set[str] = set()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._used)

    @property
    def n_in_memory(self) -> int:
        """Number of sessions in memory."""
        return len(self._states)

    def open(self, name: str) -> Session:
        """Acquire a session for a request, or create it; :meth:`close` releases it."""
        with self._lock:
            self._require_free(name)
            exists = name in self._used
            if not exists:
                self._require_place(name)
            self._busy.add(name)
        try:
            if state := self.peek(name) if exists else None:
                self._keep(name, state)
        except BaseException:
            self._release(name)
            raise
        return Session(name, self._clock(), state, is_busy=True)

    def close(self, session: Session, state: State | None = None) -> None:
        """Release a session, with its new state; None: unchanged.

        Raises:
            OSError: It cannot be saved; it is as it was.
        """
        try:
            if state is not None:
                self._save(session.name, state)
        finally:
            self._release(session.name)

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
        with self._lock:
            if name not in self._used:
                self._require_free(name)
                raise _missing(name)
            state, _ = self._states.get(name, (None, 0))
        if state is None:
            assert self._folder is not None
            # Not kept here: a request may save a later one meanwhile.
            state = self._folder.read(name)
        return state

    def find(self, name: str) -> Session:
        """Return a session without loading it."""
        with self._lock:
            if name not in self._used and name not in self._busy:
                raise _missing(name)
            state, nbytes = self._states.get(name, (None, 0))
            used = self._used.get(name, self._clock())
            return Session(name, used, state, nbytes, name in self._busy)

    def all(self, most: int | None = None) -> list[Session]:
        """Return all, the most recently used first, or at most so many of them."""
        with self._lock:
            return [*map(self.find, islice(reversed(self._used), most))]

    def delete(self, name: str) -> None:
        """Delete a session and its file."""
        with self._lock:
            self.find(name)
            self._require_free(name)
            if self._folder is not None:
                self._folder.delete(name)
            del self._used[name]
            self._drop(name)

    def expire(self) -> int:
        """Delete those that were not used for ``session_idle`` seconds; return how many.

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
                    n_deleted += 1
                except OSError as error:
                    failed.append(error)
        if failed:
            raise OSError(f"{n_deleted} sessions were deleted, {len(failed)} not: {failed[0]}")
        return n_deleted

    def _release(self, name: str) -> None:
        with self._lock:
            self._busy.discard(name)
            if name in self._used:
                self._used[name] = self._clock()
                self._used.move_to_end(name)

    def _save(self, name: str, state: State) -> None:
        if self._folder is not None:
            # If it fails, the next request loads what is in the folder.
            self._drop(name)
            self._folder.write(name, state)
        with self._lock:
            self._used[name] = self._clock()
            self._keep(name, state)

    def _keep(self, name: str, state: State) -> None:
        """Keep a state in memory; with a folder drop the oldest ones until the limits hold."""
        limits, nbytes = self._settings, bytes_of(state)
        with self._lock:
            self._drop(name)
            self._states[name] = state, nbytes
            self.nbytes += nbytes
            while self._folder is not None and (
                len(self._states) > limits.sessions_in_memory or self.nbytes > limits.session_bytes
            ):
                self._drop(next(iter(self._states)))

    def _drop(self, name: str) -> None:
        """Remove the state of a session from memory."""
        with self._lock:
            _, nbytes = self._states.pop(name, (None, 0))
            self.nbytes -= nbytes

    def _require_free(self, name: str) -> None:
        if name in self._busy:
            message = f"session {name!r} is in use by another request: wait until it has ended"
            raise SessionError("session_busy", message)

    def _require_place(self, name: str) -> None:
        """Require a place for a new session."""
        n, limits = len(self._used.keys() | self._busy), self._settings
        most, reached = limits.max_sessions, ""
        if self._folder is None:
            # There is nowhere to evict them to, and young ones will grow.
            most = min(most, limits.sessions_in_memory)
            if (nbytes := max(self.nbytes, n * self._largest)) >= limits.session_bytes:
                reached = f"the sessions have {nbytes} bytes when they are full"
        if n >= most:
            reached = f"there are {n} sessions"
        if reached:
            raise SessionError("too_many_sessions", f"{reached}, as many as may be: delete one")
        if self._folder is not None:
            # Now, and not when the answer is saved.
            self._folder.require_free(name)


def bytes_of(state: State) -> int:
    """Return the size of a state, with its note."""
    # Views: state_dict() would copy all.
    tensors = *state.mems.tensors, state.mems.forgotten, state.random, state.read
    # Answers that are kept: 256 KB and more.
    return sum(x.nbytes for x in tensors if x is not None) + len(state.note.encode())


def _missing(name: str) -> SessionError:
    return SessionError("session_not_found", f"there is no session {name!r}")
