"""Sessions: texts whose memory is kept between requests, in memory and in files.

A session handles one request at a time. What was used least recently leaves the memory and stays
on the disk; what nobody uses for long is deleted. Files are those of
:mod:`transformer_xl.inference.generate.session`, replaced atomically.
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
    """A session cannot be had."""


class SessionMissingError(SessionError):
    """There is no such session."""


class SessionBusyError(SessionError):
    """Another request uses the session."""


class TooManySessionsError(SessionError):
    """There are as many sessions as may be."""


class NoRoomError(SessionError):
    """The memory is full of sessions that cannot be saved."""


@dataclass(eq=False)
class Session:
    """A text that goes on.

    Attributes:
        name: Its name.
        used: When it was last used, in seconds since 1970.
        state: What it goes on from; None: it is on the disk, or has not begun.
        nbytes: Size of the state.
        is_saved: Whether the file holds the state.
        is_busy: Whether a request has it.
        is_moving: Whether it is on its way between memory and disk.
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
    """Return the bytes of what a session goes on from."""
    # Views, where state_dict() would copy all.
    found = *state.mems.tensors, state.mems.forgotten, state.random, state.read
    return sum(x.nbytes for x in found if x is not None)


def path_of(folder: Path, name: str) -> Path:
    """Return the file of a session."""
    # Some file systems take a and A for one name; and a folder should not become too large.
    digest = hashlib.sha256(name.encode()).hexdigest()
    return folder / digest[:2] / f"{name}.{digest[:12]}{_SUFFIX}"


def saved_sessions(folder: Path) -> Iterator[tuple[str, float]]:
    """Find the names of saved sessions and when they were used."""
    for path in folder.glob(f"??/*{_SUFFIX}"):
        name = path.name.removesuffix(_SUFFIX).rpartition(".")[0]
        if is_name(name) and path == path_of(folder, name):
            yield name, path.stat().st_mtime


class Sessions:
    """All sessions of a model; its methods may wait for the disk, and any thread may call them.

    Args:
        weights: The weights file of the model, to which memories belong.
        folder: Where they are kept. None: in memory alone.
        most: How many there may be in all.
        in_memory: How many in memory.
        memory_bytes: How many bytes in memory.
        largest: How many bytes one may come to have; without a folder, each counts as many.
        idle: Seconds after which an unused one is deleted.
        saves_each: Whether each is saved whenever it has gone on.
        model: The model that reads them. None: files are not checked against one.
        clock: What time it is.

    Raises:
        OSError: The folder cannot be made or read, or the weights file not be read.
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
        # Now: while the server runs, a better model may take the place of this one in its folder.
        self._weights, self._folder = weights_checksum(weights), folder
        self._most = most if folder else min(most, in_memory)
        self._in_memory, self._memory_bytes, self._largest = in_memory, memory_bytes, largest
        self._idle, self._saves_each = idle, saves_each
        self._model, self._clock = model, clock
        self._lock = threading.Condition()
        # In the order of their last use; those in memory once more.
        self._all: dict[str, Session] = {}
        self._held: dict[str, Session] = {}
        # Bytes of these; and how many are in use and not in memory yet.
        self._nbytes = self._n_coming = 0
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            found = sorted(saved_sessions(folder), key=lambda pair: pair[1])
            self._all = {name: Session(name, used, is_saved=True) for name, used in found}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def n_in_memory(self) -> int:
        """How many are in memory."""
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes of those in memory."""
        return self._nbytes

    def open(self, name: str) -> Session:
        """Take a session for a request, or begin it; :meth:`close` gives it back.

        Raises:
            SessionBusyError: Another request has it.
            TooManySessionsError: There is no room for a new one.
            NoRoomError: The memory is full, and the disk cannot be written.
            RuntimeError: Its file is damaged.
            ValueError: Its file belongs to another model.
            OSError: Its file cannot be read.
        """
        self._make_room(name)
        with self._lock:
            session = self._settled(name)
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
            # The one used last is the last.
            self._all[name] = self._all.pop(name)
        try:
            if session.state is None and session.is_saved:
                self._load(session)
        except BaseException:
            self._give_back(session)
            raise
        return session

    def is_at_hand(self, name: str) -> bool:
        """Whether :meth:`open` need not wait for the disk."""
        session = self._all.get(name)
        if session is None:
            return not self._is_over()
        return not session.is_moving and (session.state is not None or session.is_busy)

    def close(self, session: Session, state: State | None = None) -> None:
        """Give a session back.

        Args:
            session: The session.
            state: What it goes on from. None: from where it was.

        Raises:
            OSError: It cannot be saved; it goes on in memory.
        """
        try:
            if state is not None:
                self._hold(session, state)
                session.is_saved = False
                if self._folder and self._saves_each:
                    self._save(session)
        finally:
            self._give_back(session)
            self._evict()

    def look(self, name: str) -> State:
        """Return what a session goes on from; it may be in use, and whoever wants it can have it.

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
                raise SessionMissingError(f"session {name!r} has just begun: there is nothing yet")
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
        """Return all, those used last first."""
        with self._lock:
            return [*reversed(self._all.values())]

    def find(self, name: str) -> Session | None:
        """Return a session as it is, for a look at it."""
        return self._all.get(name)

    def save(self, name: str) -> None:
        """Save a session now.

        Raises:
            SessionError: It does not exist or is in use, or there is no folder.
            OSError: It cannot be saved.
        """
        if not self._folder:
            raise SessionError("sessions are in memory alone: start the server with --sessions DIR")
        with self._lock:
            session = self._existing(name)
            if session.is_busy:
                raise SessionBusyError(f"session {name!r} is in use by another request")
            session.is_moving = True
        with self._moving(session):
            if not session.is_saved:
                self._save(session)

    def save_all(self) -> int:
        """Save all that are not saved and not in use; return how many could not be.

        None is lost when another cannot be saved.
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
            session = self._existing(name)
            if session.is_busy:
                raise SessionBusyError(f"session {name!r} is in use by another request")
            self._remove(session)

    def expire(self) -> int:
        """Delete those that nobody used for long; return how many.

        Raises:
            OSError: Some cannot be deleted; the others are.
        """
        before, gone = self._clock() - self._idle, 0
        failed: list[OSError] = []
        for name in [s.name for s in self.all() if s.used < before]:
            with self._lock:
                session = self._settled(name)
                # Others may have been deleted meanwhile, and this one be used again.
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
        self._hold(session, None)
        del self._all[session.name]

    def _existing(self, name: str) -> Session:
        session = self._settled(name)
        if session is None:
            raise SessionMissingError(f"there is no session {name!r}")
        return session

    @contextmanager
    def _moving(self, session: Session) -> Iterator[None]:
        """Let others wait who want a session that moves between memory and disk."""
        try:
            yield
        finally:
            with self._lock:
                session.is_moving = False
                self._lock.notify_all()

    def _settled(self, name: str) -> Session | None:
        """Find a session; wait while it moves."""
        while (session := self._all.get(name)) and session.is_moving:
            self._lock.wait()
        return session

    def _hold(self, session: Session, state: State | None) -> None:
        """Keep a state in memory, or none."""
        with self._lock:
            self._held.pop(session.name, None)
            if session.is_busy:
                self._n_coming += (state is None) - (session.state is None)
            self._nbytes -= session.nbytes
            session.state, session.nbytes = state, 0 if state is None else size_of(state)
            self._nbytes += session.nbytes
            if state is not None:
                self._held[session.name] = session

    def _give_back(self, session: Session) -> None:
        with self._lock:
            self._n_coming -= session.state is None
            session.is_busy, session.used = False, self._clock()
            self._all.pop(session.name, None)
            # One that has never begun is none.
            if session.state is not None or session.is_saved:
                self._all[session.name] = session

    def _make_room(self, name: str) -> None:
        """Let others leave the memory before one comes that is not there.

        Raises:
            NoRoomError: They cannot.
        """
        session = self._all.get(name)
        if session and (session.state is not None or session.is_busy):
            return
        if error := self._evict():
            raise NoRoomError(
                f"{len(self._held)} sessions in memory, as many as may be, and not all of them "
                f"can be saved ({error})"
            )

    def _is_over(self) -> bool:
        """Whether more is in memory, or will be when those that were begun are, than may be."""
        with self._lock:
            n = len(self._held) + self._n_coming
            nbytes = self._nbytes + self._n_coming * self._largest
            return n > self._in_memory or nbytes > self._memory_bytes

    def _evict(self) -> OSError | None:
        """Let those used least recently leave the memory, as far as there is a disk.

        Returns:
            Why more than may be are still there; None where they are not, or are all in use.
        """
        failed: OSError | None = None
        while self._folder and self._is_over():
            with self._lock:
                free = (s for s in self._held.values() if not (s.is_busy or s.is_moving))
                # Where one could not be saved, the next ones would not fare better.
                session = next((s for s in free if s.is_saved or failed is None), None)
                if session is None:
                    return failed
                session.is_moving = True
            try:
                with self._moving(session):
                    if not session.is_saved:
                        self._save(session)
                    self._hold(session, None)
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
        self._hold(session, state)
