"""Sessions in Redis or Valkey, which several servers share.

What is stored of a text is its tokens, and now and then its memory: a server that takes a session
over loads the memory and reads the tokens behind it again. A server changes a session under a
lease, which it renews; each lease has a fencing number (Kleppmann, "How to do distributed locking",
2016), and the script that appends to a text accepts the last one only. So a server that was
paused for longer than its lease cannot append to what another one has continued.
"""

import logging
import re
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from transformer_xl.apps.serve import redis_scripts
from transformer_xl.apps.serve.errors import SessionError
from transformer_xl.apps.serve.replay import replay
from transformer_xl.apps.serve.serve_settings import ServeSettings, without_password
from transformer_xl.apps.serve.session_store import Lease, Stored, Turn, is_name, missing, too_many
from transformer_xl.apps.serve.texts import most_tokens
from transformer_xl.config import require
from transformer_xl.errors import CheckpointError, InputError, SettingsError
from transformer_xl.inference.generate import (
    State,
    joined,
    pack_state,
    random_numbers,
    unpack_state,
)
from transformer_xl.model import LanguageModel

log = logging.getLogger("transformer_xl.serve")

_PREFIX = "txl:"
_SECONDS = 4.0
"""How long an operation is tried again while the store does not answer."""
_SOCKET_SECONDS = 2.0
"""How long a single answer is waited for, beside the time of the largest memory."""
_SPEED = 4 << 20
"""Bytes a second that are sent, written and answered, at least."""
_PAUSE = 0.05
"""Seconds between two tries."""
_REST = 1.0
"""Seconds for which other operations fail at once after one has failed."""
_NEVER = float("-inf")
_MARGIN = 1 << 20
_MOST_FIELD = 64 << 20
"""Bytes of a field other than the memory and the tail."""
_MOST_VALUE = 512 << 20
"""Bytes that Redis takes in one field."""
_HEAD = struct.Struct("<QIII")
"""Of a record: its version, the numbers of tokens that were read and drawn, and a checksum."""
_REASONS = {
    "OutOfMemoryError": "its memory is full",
    "ReadOnlyError": "it is a replica",
    "MISCONF": "it cannot write to its disk",
    "NOREPLICAS": "it has too few replicas",
}
"""Why the store rejects the first change of a script, by the error or the first word of it."""


class Record(NamedTuple):
    """A turn, and the version that it led to."""

    version: int
    turn: Turn


def pack_record(version: int, turn: Turn) -> bytes:
    """Return a record as bytes: integers of 32 bits after its head."""
    tokens = np.asarray([*turn.read, *turn.drawn], "<i4").tobytes()
    sizes = len(turn.read), len(turn.drawn)
    return _HEAD.pack(version, *sizes, _checksum(version, *sizes, tokens)) + tokens


def unpack_records(content: bytes) -> list[Record]:
    """Return the records of a tail.

    Raises:
        CheckpointError: It is damaged.
    """
    records, start = [], 0
    while start < len(content):
        head = content[start : start + _HEAD.size].ljust(_HEAD.size, b"\0")
        version, n_read, n_drawn, checksum = _HEAD.unpack(head)
        stop = start + _HEAD.size + 4 * (n_read + n_drawn)
        tokens = content[start + _HEAD.size : stop]
        if stop > len(content):
            raise CheckpointError("a record is cut off")
        if _checksum(version, n_read, n_drawn, tokens) != checksum:
            raise CheckpointError("a record does not match its checksum")
        ids = np.frombuffer(tokens, "<i4").tolist()
        records.append(Record(version, Turn(ids[:n_read], ids[n_read:])))
        start = stop
    return records


def _checksum(version: int, n_read: int, n_drawn: int, tokens: bytes) -> int:
    return zlib.crc32(tokens, zlib.crc32(_HEAD.pack(version, n_read, n_drawn, 0)))


class RedisStore:
    """Sessions in Redis, version 7 or newer, or Valkey.

    Methods raise a SessionError where a session is missing or in use or the store does not answer,
    CheckpointError where what it holds is damaged, and InputError where that belongs to another
    model.

    Args:
        settings: The URL, the limits, the seconds of a lease.
        weights: The checksum of the weights to which the memories belong.
        model: The model that reads them.
        largest: Bytes of a state, at most.
        run: Calls a function that reads a segment, in the thread that owns the model.

    Raises:
        OSError: The server cannot be reached.
        RuntimeError: The package redis is missing.
        SettingsError: The URL is none, or a full memory is larger than Redis takes.
    """

    is_saved = True
    n_sessions: int | None = None

    def __init__(
        self,
        settings: ServeSettings,
        weights: str,
        model: LanguageModel,
        largest: int,
        run: Callable[[Callable[[], Any]], Any] = lambda function: function(),
    ) -> None:
        try:
            import redis
            import redis.exceptions
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise RuntimeError(
                "sessions in Redis need the package redis: pip install 'transformer-xl[redis]'"
            ) from error
        self._errors = redis.exceptions
        self._where, self._settings = without_password(str(settings.sessions)), settings
        self._weights, self._model, self._run = weights, model, run
        self._most_memory = largest + _MARGIN
        require(
            self._most_memory <= _MOST_VALUE,
            f"a full memory of this model has {largest:,} bytes, and Redis takes {_MOST_VALUE:,} "
            "in one value: serve it with sessions in a folder",
        )
        per_turn = settings.max_prompt + settings.max_tokens
        self._most_tail = 2 * (4 + _HEAD.size) * (settings.session_snapshot + per_turn) + _MARGIN
        self._lease_us = f"{settings.session_lease * 1e6:.0f}"
        self._idle_ms = f"{max(settings.session_idle * 1e3, 1):.0f}"
        try:
            self._client = redis.Redis.from_url(
                str(settings.sessions),
                # Of all operations: the store is one thread, where each may wait behind a memory.
                socket_timeout=_SOCKET_SECONDS + largest / _SPEED,
                socket_connect_timeout=_SOCKET_SECONDS,
                # Tried again here, until a time has passed.
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise SettingsError(f"sessions={self._where}: {error}") from error
        self._scripts = {
            name: self._client.register_script(getattr(redis_scripts, name.upper()))
            for name in ("acquire", "renew", "release", "save", "load", "delete", "list")
        }
        self._failed_at = _NEVER
        self._lock = threading.Lock()
        self._held: dict[int, Lease] = {}
        self._is_closing = threading.Event()
        self._check_server()
        self._renewing = threading.Thread(target=self._renew, name="leases", daemon=True)
        self._renewing.start()

    def all(self, most: int | None = None) -> list[Stored]:
        """Return the sessions, the most recently used first, without damaged ones."""
        count = self._settings.max_sessions if most is None else most
        names: list[Stored] = []
        for name, used, status in self._call("list", "", self._idle_ms, count, ""):
            if status == b"damaged":
                # The others can be listed.
                log.warning("ignored in the list of sessions: %s", name.decode("ascii", "replace"))
            elif is_name(text := name.decode("ascii", "replace")):
                names.append(Stored(text, float(used) / 1e6, status == b"busy"))
        return names

    def find(self, name: str) -> Stored:
        """Return one without its state."""
        ((_, used, status),) = self._call("list", name, self._idle_ms, 1, name)
        if status == b"damaged":
            raise CheckpointError(f"session {name!r} in the store is damaged")
        if status == b"missing":
            raise missing(name)
        return Stored(name, float(used) / 1e6, status == b"busy")

    def acquire(self, name: str) -> Lease:
        """Acquire a session, if no request has a lease."""
        most, holder = self._settings.max_sessions, secrets.token_bytes(16)
        answer = self._call("acquire", name, name, self._lease_us, self._idle_ms, most, holder)
        if answer[0] == b"busy":
            raise SessionError(
                "session_busy",
                f"session {name!r} is in use by another request, or by a server that died less "
                f"than {self._settings.session_lease:g} s ago: ask again",
            )
        if answer[0] == b"many":
            raise too_many(f"there are {_number(answer[1])} sessions")
        lease = Lease(name, *map(_number, answer[1:]))
        with self._lock:
            self._held[lease.number] = lease
        return lease

    def release(self, lease: Lease) -> None:
        """Give a lease back, if the store answers at once; otherwise it ends by itself."""
        with self._lock:
            self._held.pop(lease.number, None)
        if self._failed_at + _REST < time.monotonic():
            keys = self._keys(lease.name)
            with suppress(self._errors.RedisError):
                self._scripts["release"](keys, [lease.name, lease.number, self._idle_ms])

    def load(self, name: str, known: tuple[int, State] | None = None) -> tuple[int, State]:
        """Return the version and the state, for which only what follows ``known`` is read."""
        limits = self._most_memory, self._most_tail, _MOST_FIELD
        kind, *fields = self._call("load", name, int(known is None), *limits)
        if kind == b"missing":
            raise missing(name)
        if kind == b"ok" and fields[4] != self._weights.encode():
            raise InputError(f"session {name!r} was made by another model than this one")
        try:
            if kind == b"large":
                raise CheckpointError(f"its field {fields[0].decode()} is larger than can be")
            loaded = self._state(name, fields, known)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise CheckpointError(f"session {name!r} in the store is damaged: {error}") from error
        # The store may have lost what is known, and gone on from an earlier version.
        return loaded or self.load(name)

    def save(self, lease: Lease, state: State, turn: Turn) -> int:
        """Append a turn, if no other server has acquired the session since; return its version."""
        size = len(turn.read) + len(turn.drawn) + 1
        # The turns of a copy, or of a text behind a preface, are not all that was read.
        is_whole = size == 1 or (not lease.version and bool(self._model.preface))
        is_whole |= lease.n_appended + size > self._settings.session_snapshot
        content = b""
        if is_whole:
            content = pack_state(state._replace(random=None, note=""), self._weights)
        random = b"" if state.random is None else state.random.numpy().tobytes()
        record, note = pack_record(lease.number, turn), state.note.encode()
        words = lease.number, self._idle_ms, record, size, content, random, note, self._weights
        try:
            answer = self._call("save", lease.name, lease.name, *words)
        finally:
            with self._lock:
                self._held.pop(lease.number, None)
        if answer == b"unknown":
            raise self._unavailable(f"session {lease.name!r} was taken over and stored as a whole")
        if answer != b"ok":
            raise SessionError(
                "session_taken",
                f"session {lease.name!r} was taken over by another server, as this one had not "
                f"answered for more than {self._settings.session_lease:g} s; nothing of this "
                "request was appended: ask again",
            )
        return lease.number

    def delete(self, name: str) -> None:
        """Delete a session, if no request has a lease."""
        answer = self._call("delete", name, name)
        if answer == b"busy":
            message = f"session {name!r} is in use by another request: ask again"
            raise SessionError("session_busy", message)
        if answer == b"missing":
            raise missing(name)

    def expire(self, forget: Callable[[str], object]) -> int:
        """Do nothing: Redis deletes those that were not used."""
        return 0

    def close(self) -> None:
        """Close the connections."""
        self._is_closing.set()
        self._renewing.join(_SECONDS)
        self._client.close()

    def _state(
        self, name: str, fields: Sequence[Any], known: tuple[int, State] | None
    ) -> tuple[int, State] | None:
        """Return the version and the state; None: what is known is none of its versions."""
        version, snap, random, note, _, tail, memory = fields
        last, start = _number(version), _number(snap or b"0")
        records, before = unpack_records(tail), known and known[1]
        if known and known[0] not in (start, *(each.version for each in records)):
            return None
        if not known and start:
            before = unpack_state(memory, f"session {name!r}", self._weights, self._model)
        start = known[0] if known else start
        records = [each for each in records if each.version > start]
        ends = [each.version for each in records]
        if ends != sorted({*ends}) or (ends[-1] if ends else start) != last:
            raise CheckpointError("its turns are out of order")
        tokens = [token for each in records for token in (*each.turn.read, *each.turn.drawn)]
        size = self._model.config.vocab_size
        if not all(0 <= token < size for token in tokens):
            raise CheckpointError(f"it has a token outside the vocabulary of {size}")
        if before is None and not tokens:
            raise CheckpointError("it has no tokens")
        generator = torch.frombuffer(bytearray(random), dtype=torch.uint8) if random else None
        if generator is not None:
            random_numbers(generator)
        about = {"random": generator, "note": note.decode()}
        mems, last_token, unread, history = None, None, (), ()
        if before is not None:
            if not tokens:
                return last, before._replace(**about)
            mems, last_token = before.mems, before.last_token
            unread, history = (last_token,), () if before.read is None else before.read.numpy()
        turns = [each.turn for each in records]
        mems, last_token = replay(self._model, turns, mems, last_token, self._run)
        most = most_tokens(self._model.config.mem_len)
        read = joined(history, unread, tokens, most=most + 1)[:-1][-most:]
        return last, State(mems, last_token, read=torch.from_numpy(read), **about)

    def _keys(self, name: str) -> list[str]:
        return [f"{_PREFIX}session:{name}", f"{_PREFIX}fence", f"{_PREFIX}used"]

    def _call(self, script: str, name: str, *words: Any) -> Any:
        """Run a script, again if its answer was lost, until the store answers or time is up."""
        if self._failed_at + _REST > time.monotonic():
            raise self._unavailable("it did not answer a moment ago")
        # Once it has failed, one try must do: many requests wait for few threads.
        end = time.monotonic() + (_SECONDS if self._failed_at == _NEVER else 0)
        while True:
            try:
                answer = self._scripts[script](self._keys(name), words)
                self._failed_at = _NEVER
                return answer
            except self._errors.AuthenticationError as error:
                raise self._unavailable(str(error)) from error
            except (self._errors.ConnectionError, self._errors.TimeoutError) as error:
                if time.monotonic() > end:
                    self._failed_at = time.monotonic()
                    raise self._unavailable(str(error)) from error
                time.sleep(_PAUSE)
            except self._errors.ResponseError as error:
                message = str(error)
                word = message.partition(" ")[0]
                if why := _REASONS.get(type(error).__name__, _REASONS.get(word)):
                    log.error("the store of the sessions rejects a change: %s", message)
                    message = (
                        f"the store of the sessions refuses what changes it, as {why}: nothing of "
                        "this request was appended: ask again later"
                    )
                    raise SessionError("store_unavailable", message) from error
                if "WRONGTYPE" in message or "user_script" in message:
                    raise CheckpointError(f"what the store holds is damaged: {message}") from error
                raise self._unavailable(message) from error

    def _unavailable(self, why: str) -> SessionError:
        log.error("the store of the sessions, %s: %s", self._where, why)
        return SessionError(
            "store_unavailable",
            "the store of the sessions does not answer; whether this request was appended is not "
            "known: ask again with the same Idempotency-Key",
        )

    def _renew(self) -> None:
        """Renew the leases that are held, three times before one ends."""
        while not self._is_closing.wait(self._settings.session_lease / 3):
            with self._lock:
                held = [*self._held.values()]
            for lease in held:
                words = [lease.number, self._lease_us, self._idle_ms]
                try:
                    is_mine = self._scripts["renew"](self._keys(lease.name), words)
                except self._errors.ResponseError as error:
                    log.warning("session %s: its lease cannot be renewed: %s", lease.name, error)
                    continue
                except self._errors.RedisError as error:
                    log.warning("leases cannot be renewed: %s", error)
                    break
                with self._lock:
                    # It may have been given back meanwhile.
                    is_lost = not is_mine and self._held.pop(lease.number, None)
                if is_lost:
                    log.warning("session %s was taken over by another server", lease.name)

    def _check_server(self) -> None:
        """Require a server that answers; warn if it may lose what it has confirmed.

        Raises:
            OSError: It cannot be reached.
        """
        where = self._where
        try:
            self._client.ping()
        except self._errors.RedisError as error:
            raise OSError(f"sessions={where}: the store cannot be reached: {error}") from error
        names = "appendonly", "appendfsync", "maxmemory", "maxmemory-policy"
        # Not every service tells its settings.
        with suppress(self._errors.RedisError):
            values: dict[str, str] = self._client.config_get(*names)  # pyright: ignore[reportAssignmentType]
            is_kept, fsync, memory, policy = map(values.get, names)
            if is_kept != "yes" or fsync != "always":
                log.warning(
                    "%s has appendonly=%s and appendfsync=%s: a crash of its machine can lose "
                    "answers that were finished; appendonly yes and appendfsync always lose none",
                    *(where, is_kept, fsync),
                )
            if memory not in (None, "0") and policy != "noeviction":
                log.warning(
                    "%s has maxmemory-policy=%s: once its memory is full it deletes sessions whose "
                    "answers were finished; noeviction refuses new ones instead",
                    *(where, policy),
                )


def _number(value: bytes) -> int:
    if not re.fullmatch(rb"\d{1,16}", value):
        raise CheckpointError(f"what the store holds is damaged: {value[:20]!r} is no number")
    return int(value)
