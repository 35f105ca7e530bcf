"""Sessions: texts whose memory is kept between requests, in memory or in a folder.

A session handles one request at a time. With a folder, each answer is saved before it ends, to a
file of its own; only regular files are opened there, and no link is followed.
"""

import hashlib
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec

from transformer_xl.apps.serve.choices import Json
from transformer_xl.apps.serve.errors import SessionError
from transformer_xl.apps.serve.schemas import NAME
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.errors import InputError
from transformer_xl.inference.generate import State
from transformer_xl.model import LanguageModel, WeightsFiles

log = logging.getLogger("transformer_xl.serve")

_SUFFIX = ".safetensors"


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
        self._weights, self._model = WeightsFiles(weights).checksum, model
        self._folder, self._idle, self._clock = settings.folder, settings.session_idle, clock
        self._most = settings.max_sessions
        self._states: dict[str, State] = {}
        """The states without a folder."""
        self._used: OrderedDict[str, float] = OrderedDict()
        """When each was last used, in seconds since 1970, in this order."""
        if self._folder is None:
            self._most = min(self._most, max(settings.session_bytes // largest, 1))
        else:
            self._used |= _last_uses(self._folder)
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
            # Without its file, if someone removed it, the session begins anew.
            return self._read(name) if exists else None
        except BaseException:
            self._release(name)
            raise

    def close(self, name: str, state: State | None = None) -> None:
        """Release a session, with its new state; None: unchanged.

        Raises:
            OSError: It cannot be saved; it is as it was.
        """
        try:
            if state is not None:
                self._write(name, state)
                with self._lock:
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
            self.describe(name)
        if state := self._read(name):
            return state
        raise _not_found(name)

    def fork(self, name: str, to: str) -> None:
        """Begin a session with the state of another one.

        Raises:
            SessionError: There is no such session, or there is one of the new name.
        """
        state = self.peek(name)
        if self.open(to) is not None:
            self._release(to)
            message = f"there is a session {to!r}: delete it, or take another name"
            raise SessionError(409, "session_exists", message)
        self.close(to, state)

    def rewind(self, name: str, n: int) -> None:
        """Take back the last tokens of a session.

        Raises:
            SessionError: There is no such session, or so many tokens cannot be taken back.
        """
        self.describe(name)
        state = self.open(name)
        try:
            if state is None:
                raise _not_found(name)
            rewound = state.rewind(n)
        except BaseException as error:
            self._release(name)
            if isinstance(error, InputError):
                raise SessionError(400, "not_rewindable", str(error)) from error
            raise
        self.close(name, rewound)

    def describe(self, name: str) -> Json:
        """Describe a session, as a list of them shows it, without loading it."""
        with self._lock:
            if name not in self._used and name not in self._busy:
                raise _not_found(name)
            used = int(self._used.get(name, self._clock()))
            return {"id": name, "object": "session", "used": used, "is_busy": name in self._busy}

    def all(self, most: int | None = None) -> list[Json]:
        """Describe all, the most recently used first, or at most so many of them."""
        with self._lock:
            return [*map(self.describe, islice(reversed(self._used), most))]

    def delete(self, name: str) -> None:
        """Delete a session and its file."""
        with self._lock:
            self.describe(name)
            self._require_free(name)
            if self._folder is None:
                del self._states[name]
            elif _may_be_file(path := path_of(self._folder, name)):
                # What took its place is not a session's: it is left alone.
                path.unlink(missing_ok=True)
            del self._used[name]

    def expire(self) -> None:
        """Delete those that were not used for ``session_idle`` seconds."""
        before = self._clock() - self._idle
        with self._lock:
            unused = [name for name, used in self._used.items() if used < before]
            for name in [name for name in unused if name not in self._busy]:
                try:
                    self.delete(name)
                    log.info("session %s expired", name)
                except OSError as error:
                    log.error("session %s cannot be deleted: %s", name, error)

    def _read(self, name: str) -> State | None:
        """Return the state of a session; None, and the session is gone, if its file is missing."""
        if self._folder is None:
            return self._states.get(name)
        path = path_of(self._folder, name)
        if not _may_be_file(path):
            message = f"the file of session {name!r} is no regular file: take another name"
            raise SessionError(409, "session_not_a_file", message)
        try:
            return State.load(path, self._weights, self._model, follow=False)
        except FileNotFoundError:
            # Where the folder is gone, too, it may come back, as a disk that was unmounted does.
            if not self._folder.is_dir():
                raise
            log.warning("session %s is gone: its file %s was removed", name, path)
            with self._lock:
                # Since it was removed, it may have begun anew.
                if not path.exists():
                    self._used.pop(name, None)
            return None

    def _write(self, name: str, state: State) -> None:
        if self._folder is None:
            self._states[name] = state
            return
        path = path_of(self._folder, name)
        if not _may_be_file(path):
            raise OSError(f"{path} is no regular file")
        state.save(path, self._weights)

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


class _Note(msgspec.Struct):
    """What a session keeps with its state; versions before kept more."""

    turns: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] = 0


def turns_of(state: State | None) -> int:
    """Return how many answers a session has given; raises a SessionError if it is damaged."""
    try:
        note = state.note if state else ""
        return msgspec.json.decode(note, type=_Note).turns if note else 0
    except msgspec.DecodeError as error:
        message = f"what the session keeps with its state is damaged: {error}"
        raise SessionError(409, "session_damaged", message) from error


def _not_found(name: str) -> SessionError:
    return SessionError(404, "session_not_found", f"there is no session {name!r}")


def path_of(folder: Path, name: str) -> Path:
    """Return the file of a session."""
    # Some file systems ignore case; subfolders keep each folder small.
    digest = hashlib.sha256(name.encode()).hexdigest()
    return folder / digest[:2] / f"{name}.{digest[:12]}{_SUFFIX}"


def _last_uses(folder: Path) -> dict[str, float]:
    """Return when the sessions in a folder, which is created, were last used, the oldest first."""
    folder.mkdir(parents=True, exist_ok=True)
    uses: dict[str, float] = {}
    for path in folder.glob(f"[0-9a-f][0-9a-f]/*{_SUFFIX}"):
        name = path.name.removesuffix(_SUFFIX).rpartition(".")[0]
        if re.fullmatch(NAME, name) is None or path != path_of(folder, name):
            continue
        if _may_be_file(path):
            uses[name] = path.lstat().st_mtime
        else:
            log.warning("ignored in the folder of the sessions, no regular file: %r", str(path))
    return dict(sorted(uses.items(), key=lambda each: each[1]))


def _may_be_file(path: Path) -> bool:
    """Whether a path is a regular file or nothing, and no link, nor below one."""
    is_link = path.is_symlink() or path.parent.is_symlink()
    return not is_link and (path.is_file() or not path.exists())
