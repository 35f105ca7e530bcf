"""Sessions in Redis or Valkey, which several servers share.

What is stored of a text is its tokens, and now and then its memory: a server that takes a session
over loads the memory and reads the tokens behind it again. A server changes a session under a
lease, which it renews; each lease has a fencing number (Kleppmann, "How to do distributed locking",
2016), and the script that appends to a text refuses any but the last one. So a server that was
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
from transformer_xl.apps.serve.errors import (
    SessionBusyError,
    SessionMissingError,
    SessionTakenError,
    StoreUnavailableError,
    TooManySessionsError,
)
from transformer_xl.apps.serve.replay import replay
from transformer_xl.apps.serve.serve_settings import ServeSettings, without_password
from transformer_xl.apps.serve.session_store import Lease, Stored, Turn, is_name
from transformer_xl.apps.serve.texts import most_tokens
from transformer_xl.config.checks import require
from transformer_xl.inference.generate import State, pack_state, random_numbers, unpack_state
from transformer_xl.inference.generate.history import joined
from transformer_xl.model import LanguageModel

log = logging.getLogger("transformer_xl.serve")

_PREFIX = "txl:"
_SECONDS = 4.0
"""How long an operation is tried again while the store does not answer."""
_SOCKET_SECONDS = 2.0
"""How long a single answer is waited for, beside the time of the largest memory."""
_SPEED = 4 << 20
"""Bytes a second that are sent, written and answered, at least."""
_LARGE = 1 << 20
"""Bytes of a script's arguments above which a slow answer says nothing of other sessions."""
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
        ValueError: It is damaged.
    """
    found, start = [], 0
    while start < len(content):
        if len(content) - start < _HEAD.size:
            raise ValueError("a record is cut off")
        version, n_read, n_drawn, expected = _HEAD.unpack_from(content, start)
        start += _HEAD.size
        stop = start + 4 * (n_read + n_drawn)
        if stop > len(content):
            raise ValueError("a record is cut off")
        if _checksum(version, n_read, n_drawn, content[start:stop]) != expected:
            raise ValueError("a record does not match its checksum")
        tokens = np.frombuffer(content[start:stop], "<i4").tolist()
        found.append(Record(version, Turn(tokens[:n_read], tokens[n_read:])))
        start = stop
    return found


def _checksum(version: int, n_read: int, n_drawn: int, tokens: bytes) -> int:
    return zlib.crc32(tokens, zlib.crc32(_HEAD.pack(version, n_read, n_drawn, 0)))


class RedisStore:
    """Sessions in Redis, version 7 or newer, or Valkey.

    Args:
        settings: The URL, the limits, the seconds of a lease.
        weights: The checksum of the weights to which the memories belong.
        model: The model that reads them.
        largest: Bytes of a state, at most.
        run: Calls a function that reads a segment, in the thread that owns the model.

    Raises:
        OSError: The server cannot be reached.
        RuntimeError: The package redis is missing.
        ValueError: The URL is none, or a full memory is larger than Redis takes.
    """

    is_shared = True

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
        self._url, self._settings = str(settings.sessions), settings
        self._weights, self._model, self._run = weights, model, run
        self._most_memory = largest + _MARGIN
        require(
            self._most_memory <= _MOST_VALUE,
            f"a full memory of this model has {largest:,} bytes, and Redis takes {_MOST_VALUE:,} "
            "in one value: serve it with sessions in a folder",
        )
        per_turn = settings.max_prompt + settings.max_tokens
        self._most_tail = 2 * (4 + _HEAD.size) * (settings.session_snapshot + per_turn) + _MARGIN
        self._lease_us = text_of(settings.session_lease * 1e6)
        self._idle_ms = text_of(max(settings.session_idle * 1e3, 1))
        # Of all operations: the store is one thread, where each may wait behind a memory.
        seconds = _SOCKET_SECONDS + largest / _SPEED
        try:
            self._client = redis.Redis.from_url(
                self._url,
                socket_timeout=seconds,
                socket_connect_timeout=_SOCKET_SECONDS,
                # Tried again here, until a time has passed.
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise ValueError(f"sessions={without_password(self._url)}: {error}") from error
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
        try:
            now, rows = self._call("list", "", self._idle_ms, count)
        except RuntimeError as error:
            raise self._unavailable(str(error)) from error
        names = [each.decode("ascii", "replace") for each in rows[::2]]
        named = [(n, float(x)) for n, x in zip(names, rows[1::2], strict=True) if is_name(n)]
        until = self._tried(lambda: self._leases([name for name, _ in named]))
        found = []
        for (name, used), end in zip(named, until, strict=True):
            try:
                if isinstance(end, Exception):
                    raise RuntimeError(f"what the store holds is damaged: {end}")
                found.append(Stored(name, used / 1e6, _number(end or b"0") > int(now)))
            except RuntimeError as error:
                # The others are not told worse for it.
                log.warning("ignored in the list of sessions: %s: %s", name, error)
        return found

    def find(self, name: str) -> Stored:
        """Return one without its state."""
        used, version, until, time_now = self._tried(lambda: self._about(name))
        if version is None:
            raise SessionMissingError(f"there is no session {name!r}")
        now = time_now[0] * 10**6 + time_now[1]
        return Stored(name, (used or now) / 1e6, _number(until or b"0") > now)

    def acquire(self, name: str, version: int) -> Lease:
        """Acquire a session, if no other server has a lease."""
        most = self._settings.max_sessions
        given = (name, self._lease_us, self._idle_ms, most, secrets.token_bytes(16))
        found = self._call("acquire", name, *given)
        if found[0] == b"busy":
            raise SessionBusyError(
                f"session {name!r} is in use by another server, or by one that has died less than "
                f"{self._settings.session_lease:g} s ago: ask again"
            )
        if found[0] == b"many":
            message = f"there are {_number(found[1])} sessions, as many as may be: delete one"
            raise TooManySessionsError(message)
        lease = Lease(name, *map(_number, found[1:]))
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
        """Load what the caller does not know, and read it."""
        version = known[0] if known else 0
        limits = self._most_memory, self._most_tail, _MOST_FIELD
        kind, *found = self._call("load", name, version, *limits)
        if kind == b"missing":
            raise SessionMissingError(f"there is no session {name!r}")
        try:
            if kind == b"large":
                raise ValueError(f"its field {found[0].decode()} is larger than can be")
            return self._state(name, found, known)
        except (ValueError, UnicodeDecodeError, TypeError, IndexError) as error:
            if isinstance(error, _OtherModelError):
                raise
            raise RuntimeError(f"session {name!r} in the store is damaged: {error}") from error

    def save(self, lease: Lease, state: State, turn: Turn) -> int:
        """Append a turn, if no other server has acquired the session since."""
        size = len(turn.read) + len(turn.drawn) + 1
        # The turns of a copy, or of a text behind a preface, are not all that was read.
        is_whole = size == 1 or (not lease.version and bool(self._model.preface))
        is_whole |= lease.n_appended + size > self._settings.session_snapshot
        content = b""
        if is_whole:
            content = pack_state(state._replace(random=None, note=""), self._weights)
        random = b"" if state.random is None else state.random.numpy().tobytes()
        record, note = pack_record(lease.number, turn), state.note.encode()
        given = (lease.name, lease.number, self._idle_ms)
        given = (*given, record, size, content, random, note, self._weights)
        n_tries = 0

        def run() -> Any:
            nonlocal n_tries
            n_tries += 1
            return self._scripts["save"](self._keys(lease.name), given)

        try:
            found = self._tried(run, len(content))
        finally:
            with self._lock:
                self._held.pop(lease.number, None)
        if found == b"unknown" and n_tries > 1:
            raise self._unavailable(f"session {lease.name!r} was taken over and stored as a whole")
        if found != b"ok":
            raise SessionTakenError(
                f"session {lease.name!r} was taken over by another server, as this one had not "
                f"answered for more than {self._settings.session_lease:g} s; nothing of this "
                "request was appended: ask again"
            )
        return lease.number

    def delete(self, name: str) -> None:
        """Delete a session, if no server has a lease."""
        (found, _) = self._call("delete", name, name)
        if found == b"busy":
            raise SessionBusyError(f"session {name!r} is in use by another server: ask again")
        if not found:
            raise SessionMissingError(f"there is no session {name!r}")

    def close(self) -> None:
        """Close the connections."""
        self._is_closing.set()
        self._renewing.join(_SECONDS)
        self._client.close()

    def _state(
        self, name: str, found: Sequence[Any], known: tuple[int, State] | None
    ) -> tuple[int, State]:
        is_known, version, _, snap, random, note, weights, tail, memory = found
        if weights.decode() != self._weights:
            raise _OtherModelError(f"session {name!r} was made by another model than this one")
        number, start = _number(version), _number(snap or b"0")
        before: State | None = None
        if is_known and known:
            start, before = known
        elif start:
            before = unpack_state(memory, f"session {name!r}", self._weights, self._model)
        records = [each for each in unpack_records(tail) if each.version > start]
        ends = [each.version for each in records]
        if ends != sorted({*ends}) or (ends[-1] if ends else start) != number:
            raise ValueError("its turns are out of order")
        tokens = [token for each in records for token in (*each.turn.read, *each.turn.drawn)]
        size = self._model.config.vocab_size
        if not all(0 <= token < size for token in tokens):
            raise ValueError(f"it has a token outside the vocabulary of {size}")
        given = torch.frombuffer(bytearray(random), dtype=torch.uint8) if random else None
        if given is not None:
            random_numbers(given)
        if before is None and not tokens:
            raise ValueError("it has no tokens")
        if not tokens:
            assert before is not None
            return number, before._replace(random=given, note=note.decode())
        mems, last = None, None
        history: Sequence[int] | np.ndarray = ()
        if before is not None:
            mems, last = before.mems, before.last_token
            history = () if before.read is None else before.read.numpy()
        turns = [each.turn for each in records]
        mems, last_token = replay(self._model, turns, mems, last, self._run)
        most = most_tokens(self._model.config.mem_len)
        all_read = joined(history, () if last is None else (last,), tokens, most=most + 1)[:-1]
        read = torch.from_numpy(all_read[-most:])
        return number, State(mems, last_token, given, read=read, note=note.decode())

    def _keys(self, name: str) -> list[str]:
        return [f"{_PREFIX}session:{name}", f"{_PREFIX}fence", f"{_PREFIX}used"]

    def _call(self, script: str, name: str, *given: Any) -> Any:
        """Run a script; each may be run again if its answer was lost."""
        return self._tried(lambda: self._scripts[script](self._keys(name), given))

    def _tried(self, function: Callable[[], Any], size: int = 0) -> Any:
        """Call a function, which sends so many bytes, until the store answers or time is up."""
        if self._failed_at + _REST > time.monotonic():
            raise self._unavailable("it did not answer a moment ago")
        # Once it has failed, one try must do: many requests wait for few threads.
        end = time.monotonic() + (_SECONDS if self._failed_at == _NEVER else 0)
        while True:
            try:
                found = function()
                self._failed_at = _NEVER
                return found
            except self._errors.AuthenticationError as error:
                raise self._unavailable(str(error)) from error
            except (self._errors.ConnectionError, self._errors.TimeoutError) as error:
                is_timeout = isinstance(error, self._errors.TimeoutError)
                if time.monotonic() > end + is_timeout * size / _SPEED:
                    if not (is_timeout and size > _LARGE):
                        self._failed_at = time.monotonic()
                    raise self._unavailable(str(error)) from error
                time.sleep(_PAUSE)
            except self._errors.ResponseError as error:
                message = str(error)
                if why := self._refusal(error):
                    log.error("the store of the sessions refuses: %s", message)
                    raise StoreUnavailableError(
                        f"the store of the sessions refuses what changes it, as {why}: nothing of "
                        "this request was appended: ask again later"
                    ) from error
                if "WRONGTYPE" in message or "user_script" in message:
                    raise RuntimeError(f"what the store holds is damaged: {message}") from error
                raise self._unavailable(message) from error

    def _refusal(self, error: Exception) -> str | None:
        """Return why the store has refused the first change of a script, if that is known."""
        if isinstance(error, self._errors.OutOfMemoryError):
            return "its memory is full"
        if isinstance(error, self._errors.ReadOnlyError):
            return "it is a replica"
        if str(error).startswith("MISCONF"):
            return "it cannot write to its disk"
        return "it has too few replicas" if str(error).startswith("NOREPLICAS") else None

    def _unavailable(self, why: str) -> StoreUnavailableError:
        where = without_password(self._url)
        log.error("the store of the sessions, %s: %s", where, why)
        return StoreUnavailableError(
            "the store of the sessions does not answer; whether this request was appended is not "
            "known: ask again with the same Idempotency-Key"
        )

    def _leases(self, names: Sequence[str]) -> list[bytes | Exception | None]:
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hget(self._keys(name)[0], "until")
            return pipeline.execute(raise_on_error=False)

    def _about(self, name: str) -> tuple[float | None, Any, Any, tuple[int, int]]:
        with self._client.pipeline(transaction=True) as pipeline:
            key, _, names = self._keys(name)
            pipeline.zscore(names, name)
            pipeline.hmget(key, "version", "until")
            pipeline.time()
            used, (version, until), now = pipeline.execute()
        return used, version, until, now

    def _renew(self) -> None:
        """Renew the leases that are held, three times before one ends."""
        while not self._is_closing.wait(self._settings.session_lease / 3):
            with self._lock:
                held = [*self._held.values()]
            for lease in held:
                try:
                    given = [lease.number, self._lease_us, self._idle_ms]
                    is_mine = self._scripts["renew"](self._keys(lease.name), given)
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
        where = without_password(self._url)
        try:
            self._client.ping()
        except self._errors.RedisError as error:
            raise OSError(f"sessions={where}: the store cannot be reached: {error}") from error
        # Not every service tells its settings.
        with suppress(self._errors.RedisError):
            found = self._client.config_get(
                *("appendonly", "appendfsync", "maxmemory", "maxmemory-policy")
            )
            values = {_text(key): _text(x) for key, x in dict(found).items()}
            if values.get("appendonly") != "yes" or values.get("appendfsync") != "always":
                log.warning(
                    "%s has appendonly=%s and appendfsync=%s: a crash of its machine can lose "
                    "answers that were finished; appendonly yes and appendfsync always lose none",
                    *(where, values.get("appendonly"), values.get("appendfsync")),
                )
            policy = values.get("maxmemory-policy")
            if values.get("maxmemory") not in (None, "0") and policy != "noeviction":
                log.warning(
                    "%s has maxmemory-policy=%s: once its memory is full it deletes sessions whose "
                    "answers were finished; noeviction refuses new ones instead",
                    *(where, policy),
                )


class _OtherModelError(ValueError):
    """A session belongs to another model."""


def text_of(number: float) -> str:
    """Return a whole number as scripts take it."""
    return f"{number:.0f}"


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _number(value: bytes) -> int:
    if not re.fullmatch(rb"\d{1,16}", value):
        raise RuntimeError(f"what the store holds is damaged: {value[:20]!r} is no number")
    return int(value)
