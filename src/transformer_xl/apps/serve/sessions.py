"""Sessions: texts whose memory is kept between requests, in memory and in files.

A session handles one request at a time. The least recently used ones are evicted from memory to
the disk; unused ones expire. Files are those of :mod:`transformer_xl.inference.generate.session`,
replaced atomically.
"""

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformer_xl.inference.generate import State, load_state, write_state
from transformer_xl.model import LanguageModel
from transformer_xl.model.pretrained import weights_checksum

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SUFFIX = ".safetensors"


class SessionError(Exception):
    """A session is not available."""


class SessionMissingError(SessionError):
    """There is no such session."""


class SessionBusyError(SessionError):
    """Another request uses the session."""


class TooManySessionsError(SessionError):
    """The largest number of sessions is reached."""


class StorageFullError(SessionError):
    """The memory is full of sessions that cannot be saved."""


@dataclass(eq=False)
class Session:
    """A text that is continued by one request after another.

    Attributes:
        name: Its name.
        used: When it was last used, in seconds since 1970.
        state: The state to continue from; None: it is on the disk, or has not begun.
        nbytes: Size of the state.
        is_saved: Whether the file holds the state.
        is_busy: Whether a request has acquired it.
        is_moving: Whether it is being loaded or saved.
    """

    name: str
    used: float
    state: State | None = None
    nbytes: int = 0
    is_saved: bool = False
    is_busy: bool = False
    is_moving: bool = False


def is_name(name: str) -> bool:
    """Whether a session can have this name."""
    return bool(_NAME.fullmatch(name))


def size_of(state: State) -> int:
    """Return the bytes of a state."""
    # Views: state_dict() would copy all.
    found = *state.mems.tensors, state.mems.forgotten, state.random, state.read
    return sum(x.nbytes for x in found if x is not None)


def path_of(folder: Path, name: str) -> Path:
    """Return the file of a session."""
    # Some file systems ignore case; subfolders keep each folder small.
    digest = hashlib.sha256(name.encode()).hexdigest()
    return folder / digest[:2] / f"{name}.{digest[:12]}{_SUFFIX}"


def saved_sessions(folder: Path) -> Iterator[tuple[str, float]]:
    """Find the names of saved sessions and when they were used."""
    for path in folder.glob(f"??/*{_SUFFIX}"):
        name = path.name.removesuffix(_SUFFIX).rpartition(".")[0]
        if is_name(name) and path == path_of(folder, name):
            yield name, path.stat().st_mtime


class Sessions:
    """All sessions of a model. Methods may block on the disk; they are thread-safe.

    Args:
        weights: The weights file of the model, to which memories belong.
        folder: Where they are saved. None: in memory only.
        most: Largest number in all.
        in_memory: Largest number in memory.
        memory_bytes: Largest number of bytes in memory.
        largest: Bytes that one may grow to; without a folder, each counts as many.
        idle: Seconds after which an unused one is deleted.
        saves_each: Whether each is saved after every request.
        model: The model that reads them. None: files are not checked against one.
        clock: Returns the time.

    Raises:
        OSError: The folder cannot be created or read, or the weights file cannot be read.
    """

    def __init__(
        self,
        weights: Path,
        folder: Path | None = None,
        *,
        most: int = 10_000,
        in_memory: int = 1_000,
        memory_bytes: int = 1 << 30,
        largest: int = 0,
        idle: float = 604_800.0,
        saves_each: bool = True,
        model: LanguageModel | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        # At the start: while the server runs, another model may be written to this folder.
        self._weights, self._folder = weights_checksum(weights), folder
        self._most = most if folder else min(most, in_memory)
        self._in_memory, self._memory_bytes, self._largest = in_memory, memory_bytes, largest
        self._idle, self._saves_each = idle, saves_each
        self._model, self._clock = model, clock
        self._lock = threading.Condition()
        # Both in the order of last use; the second has those in memory.
        self._all: dict[str, Session] = {}
        self._held: dict[str, Session] = {}
        # Bytes of those in memory; number of acquired sessions whose state is not in memory yet.
        self._nbytes = self._n_coming = 0
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            found = sorted(saved_sessions(folder), key=lambda pair: pair[1])
            self._all = {name: Session(name, used, is_saved=True) for name, used in found}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def n_in_memory(self) -> int:
        """Number of sessions in memory."""
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes of the sessions in memory."""
        return self._nbytes

    def open(self, name: str) -> Session:
        """Acquire a session for a request, or create it; :meth:`close` releases it.

        Raises:
            SessionBusyError: Another request has acquired it.
            TooManySessionsError: The largest number of sessions is reached.
            StorageFullError: The memory is full, and the disk cannot be written.
            RuntimeError: Its file is damaged.
            ValueError: Its file belongs to another model.
            OSError: Its file cannot be read.
        """
        self._evict_for(name)
        with self._lock:
            session = self._after_move(name)
            if session is None:
                if len(self._all) >= self._most:
                    raise TooManySessionsError(
                        f"there are {len(self._all)} sessions, as many as may be"
                    )
                nbytes = max(self._nbytes, len(self._all) * self._largest)
                if not self._folder and nbytes >= self._memory_bytes:
                    raise TooManySessionsError(
                        f"the sessions have {nbytes} bytes when they are full, as many as may be"
                    )
                session = self._all[name] = Session(name, self._clock())
            if session.is_busy:
                raise SessionBusyError(f"session {name!r} is in use by another request")
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
        """Release a session.

        Args:
            session: The session.
            state: Its new state. None: the state is unchanged.

        Raises:
            OSError: It cannot be saved; it stays in memory.
        """
        try:
            if state is not None:
                self._set_state(session, state)
                session.is_saved = False
                if self._folder and self._saves_each:
                    self._save(session)
        finally:
            self._release(session)
            self._evict()

    def peek(self, name: str) -> State:
        """Return the state of a session without acquiring it, even while it is in use.

        Raises:
            SessionError: It does not exist, or has not begun.
            RuntimeError: Its file is damaged.
            ValueError: Its file belongs to another model.
            OSError: Its file cannot be read.
        """
        with self._lock:
            session = self._existing(name)
            if session.state is not None:
                return session.state
            if not session.is_saved:
                raise SessionMissingError(f"session {name!r} has just begun and has no state yet")
            if session.is_busy:
                raise SessionBusyError(f"session {name!r} is in use by another request")
            session.is_moving = True
        with self._moving(session):
            self._load(session)
            state = session.state
        assert state is not None
        self._evict()
        return state

    def all(self) -> list[Session]:
        """Return all, the most recently used first."""
        with self._lock:
            return [*reversed(self._all.values())]

    def find(self, name: str) -> Session | None:
        """Return a session without loading it, or None."""
        return self._all.get(name)

    def save(self, name: str) -> None:
        """Save a session now.

        Raises:
            SessionError: It does not exist or is in use, or there is no folder.
            OSError: It cannot be saved.
        """
        if not self._folder:
            raise SessionError("sessions are in memory only: start the server with --sessions DIR")
        with self._lock:
            session = self._existing(name, is_free=True)
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
            if session.is_saved or session.state is None:
                continue
            try:
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
            self._remove(self._existing(name, is_free=True))

    def expire(self) -> int:
        """Delete those that were not used for ``idle`` seconds; return how many.

        Raises:
            OSError: Some cannot be deleted; the others are.
        """
        before, gone = self._clock() - self._idle, 0
        failed: list[OSError] = []
        for name in [s.name for s in self.all() if s.used < before]:
            with self._lock:
                session = self._after_move(name)
                # It may have been deleted or used meanwhile.
                if session and session.used < before and not session.is_busy:
                    try:
                        self._remove(session)
                        gone += 1
                    except OSError as error:
                        failed.append(error)
        if failed:
            raise OSError(f"{gone} sessions were deleted, {len(failed)} not: {failed[0]}")
        return gone

    def _remove(self, session: Session) -> None:
        if self._folder:
            path_of(self._folder, session.name).unlink(missing_ok=True)
        self._set_state(session, None)
        del self._all[session.name]

    def _existing(self, name: str, *, is_free: bool = False) -> Session:
        session = self._after_move(name)
        if session is None:
            raise SessionMissingError(f"there is no session {name!r}")
        if is_free and session.is_busy:
            raise SessionBusyError(f"session {name!r} is in use by another request")
        return session

    @contextmanager
    def _moving(self, session: Session) -> Iterator[None]:
        """Block other callers while a session is loaded or saved."""
        try:
            yield
        finally:
            with self._lock:
                session.is_moving = False
                self._lock.notify_all()

    def _after_move(self, name: str) -> Session | None:
        """Find a session; wait while it moves."""
        while (session := self._all.get(name)) and session.is_moving:
            self._lock.wait()
        return session

    def _set_state(self, session: Session, state: State | None) -> None:
        """Set the state in memory, or drop it; update the byte counts."""
        with self._lock:
            self._held.pop(session.name, None)
            if session.is_busy:
                self._n_coming += (state is None) - (session.state is None)
            self._nbytes -= session.nbytes
            session.state, session.nbytes = state, 0 if state is None else size_of(state)
            self._nbytes += session.nbytes
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

    def _evict_for(self, name: str) -> None:
        """Evict others before a session is loaded.

        Raises:
            StorageFullError: They cannot be saved.
        """
        session = self._all.get(name)
        if session and (session.state is not None or session.is_busy):
            return
        if error := self._evict():
            raise StorageFullError(
                f"{len(self._held)} sessions in memory, as many as may be, and not all of them "
                f"can be saved ({error})"
            )

    def _exceeds_limits(self) -> bool:
        """Whether the sessions in memory and those being loaded exceed a limit."""
        with self._lock:
            n = len(self._held) + self._n_coming
            nbytes = self._nbytes + self._n_coming * self._largest
            return n > self._in_memory or nbytes > self._memory_bytes

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
        write_state(path_of(self._folder, session.name), session.state, self._weights)
        session.is_saved = True

    def _load(self, session: Session) -> None:
        assert self._folder is not None
        state = load_state(path_of(self._folder, session.name), self._weights, self._model)
        self._set_state(session, state)
