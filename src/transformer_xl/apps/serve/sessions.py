"""Sessions: texts whose memory is kept between requests.

A session handles one request at a time. With a folder, each answer is saved before it ends.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from transformer_xl.apps.serve.errors import SessionError
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.session_store import MemoryStore, SessionFolder
from transformer_xl.inference.generate import State
from transformer_xl.model import LanguageModel, weights_checksum

log = logging.getLogger("transformer_xl.serve")


class Session(NamedTuple):
    """A session, as a list of them shows it."""

    name: str
    used: float
    """When it was last used, in seconds since 1970."""
    is_busy: bool
    """Whether a request has acquired it."""


class Sessions:
    """All sessions of a model. Methods may block on the disk; they are thread-safe.

    They raise a SessionError where a session is missing or in use, OSError where a file cannot be
    read or written, CheckpointError where it is damaged, and InputError where it belongs to another
    model.

    Args:
        settings: The folder, and the limits.
        weights: The weights file of the model, to which memories belong.
        model: The model that reads them. None: files are not checked against one.
        largest: Bytes that one may grow to.
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
        largest: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        # At the start: while the server runs, another model may be written to this folder.
        checksum = weights_checksum(weights)
        self._idle, self._clock = settings.session_idle, clock
        self._most, self._store = settings.max_sessions, MemoryStore()
        if settings.folder is None:
            self._most = min(self._most, max(settings.session_bytes // largest, 1))
        else:
            self._store = SessionFolder(settings.folder, checksum, model)
        self._used = OrderedDict(self._store.used())
        """When each was last used, in this order."""
        self._busy: set[str] = set()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._used)

    def open(self, name: str) -> State | None:
        """Acquire a session for a request, until :meth:`close`; return its state. None: it begins.

        Raises:
            SessionError: It is in use, or there is no capacity for another one.
        """
        with self._lock:
            self._require_free(name)
            exists = name in self._used
            if not exists and (n := len(self._used.keys() | self._busy)) >= self._most:
                message = f"there are {n} sessions, as many as may be: delete one"
                raise SessionError(429, "too_many_sessions", message)
            self._busy.add(name)
        try:
            if exists:
                return self._store.read(name)
            # Now, and not when the answer is saved.
            self._store.require_free(name)
        except BaseException:
            self._release(name)
            raise
        return None

    def close(self, name: str, state: State | None = None) -> None:
        """Release a session, with its new state; None: unchanged.

        Raises:
            OSError: It cannot be saved; it is as it was.
        """
        try:
            if state is not None:
                self._store.write(name, state)
                self._used[name] = self._clock()
        finally:
            self._release(name)

    def peek(self, name: str) -> State:
        """Return the state of a session without acquiring it, even while it is in use.

        Raises:
            SessionError: There is none, or its first answer is not complete.
        """
        with self._lock:
            if name not in self._used:
                self._require_free(name)
            self.find(name)
        return self._store.read(name)

    def find(self, name: str) -> Session:
        """Return a session without loading it."""
        with self._lock:
            if name not in self._used and name not in self._busy:
                raise SessionError(404, "session_not_found", f"there is no session {name!r}")
            used = self._used.get(name, self._clock())
            return Session(name, used, name in self._busy)

    def all(self, most: int | None = None) -> list[Session]:
        """Return all, the most recently used first, or at most so many of them."""
        with self._lock:
            return [*map(self.find, islice(reversed(self._used), most))]

    def delete(self, name: str) -> None:
        """Delete a session and its file."""
        with self._lock:
            self.find(name)
            self._require_free(name)
            self._store.delete(name)
            del self._used[name]

    def expire(self) -> None:
        """Delete those that were not used for ``session_idle`` seconds."""
        before = self._clock() - self._idle
        for name in [each.name for each in self.all() if each.used < before]:
            with self._lock:
                if name in self._busy or self._used.get(name, before) >= before:
                    continue
                try:
                    self.delete(name)
                    log.info("session %s expired", name)
                except OSError as error:
                    log.error("session %s cannot be deleted: %s", name, error)

    def _release(self, name: str) -> None:
        with self._lock:
            self._busy.discard(name)
            if name in self._used:
                self._used[name] = self._clock()
                self._used.move_to_end(name)

    def _require_free(self, name: str) -> None:
        if name in self._busy:
            message = f"session {name!r} is in use by another request: wait until it has ended"
            raise SessionError(409, "session_busy", message)
