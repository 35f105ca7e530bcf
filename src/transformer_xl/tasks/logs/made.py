"""Synthetic logs of interleaved sessions, with labelled anomalies that only their context shows.

Twelve slots each run one session after another, and each line is written by a slot drawn at random:

* files: ``f7 open u3 rw``, then reads and, unless they are opened ``ro``, writes, ``f7 close u3``;
* requests: ``r4 get p2``, up to two queries, ``r4 reply p2 5ms`` with a latency of that path;
* jobs: ``j5 run 1``, ``j5 done 1``, or ``j5 fail 1`` and ``j5 run 2``; ``j5 dead 3`` is the end;
* locks: ``k9 take u1``, and some hundred tokens later ``k9 free u1``, with nothing in between.

An anomaly is a line of the same form as the others, in the wrong place: see `ANOMALIES`.
"""

import random
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

ANOMALIES = {
    "unopened": "an event of a session that was not opened",
    "closed": "an event of a session that has ended",
    "reopened": "a session opened while it is open: its end is missing",
    "user": "an event in the name of another user than the one who opened the session",
    "repeat": "the last event of an open session again, where it cannot repeat",
    "read_only": "a write to a file that was opened to be read",
    "latency": "a latency that is not one of the path",
}
"""What can be wrong with a line."""

SLOTS = {"f": (3, 1.0), "r": (2, 1.0), "j": (2, 1.0), "k": (5, 0.1)}
"""By the letter of a session: its slots, and how often such a slot writes a line."""
NUMBERS = {"f": 30, "r": 30, "j": 20, "k": 12}
"""By the letter of a session: how many numbers there are; they are used in turn, those of locks at
random."""
USERS, PATHS = 8, 8
LATENCIES = ("1ms", "2ms", "5ms", "10ms", "20ms", "50ms", "100ms", "200ms", "500ms")
"""Those of path n are the two from the n-th on."""
_ENDS = ("close", "reply", "done", "dead", "free")
_RECENT = 12
"""Sessions that ended last, of which there are events after the end."""


class Line(NamedTuple):
    """A line of a log."""

    text: str
    anomaly: str | None
    """One of `ANOMALIES`; None: the line is as it should be."""


@dataclass
class _Session:
    """A session: its name, what it is bound to, and the lines that it has still to write."""

    name: str
    user: str
    mode: str
    path: int
    script: Iterator[str] = field(default_factory=lambda: iter(()))
    last: str = ""

    @property
    def letter(self) -> str:
        """What it is: one of `SLOTS`."""
        return self.name[0]

    @property
    def event(self) -> str:
        """The event of its last line."""
        return self.last.split()[1]

    def reply(self, latency: int) -> str:
        """Return the line that ends a request."""
        return f"{self.name} reply p{self.path} {LATENCIES[latency]}"


class _Log:
    """The sessions in all slots."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        slots = [(letter, weight) for letter, (n, weight) in SLOTS.items() for _ in range(n)]
        self._letters, self._weights = [x for x, _ in slots], [x for _, x in slots]
        self._slots: list[_Session | None] = [None] * len(slots)
        self._next = dict.fromkeys(SLOTS, 0)
        self._ended: deque[_Session] = deque(maxlen=_RECENT)

    def line(self) -> str:
        """Return the next line, without an anomaly."""
        (slot,) = self._random.choices(range(len(self._slots)), self._weights)
        session = self._slots[slot]
        if session is None:
            session = self._slots[slot] = self._session(self._new_name(self._letters[slot]))
        session.last = next(session.script)
        if session.event in _ENDS:
            self._ended.append(session)
            self._slots[slot] = None
        return session.last

    def _free(self, letter: str) -> list[str]:
        """Return the names that no open session has."""
        taken = {session.name for session in self._slots if session is not None}
        names = (f"{letter}{n}" for n in range(NUMBERS[letter]))
        return [name for name in names if name not in taken]

    def _new_name(self, letter: str) -> str:
        free = self._free(letter)
        if letter == "k":
            return self._random.choice(free)
        while (name := f"{letter}{self._next[letter]}") not in free:
            self._next[letter] = (self._next[letter] + 1) % NUMBERS[letter]
        self._next[letter] = (self._next[letter] + 1) % NUMBERS[letter]
        return name

    def _session(self, name: str) -> _Session:
        draw = self._random.randrange
        session = _Session(name, f"u{draw(USERS)}", ("ro", "rw")[draw(2)], draw(PATHS))
        scripts = {"f": self._file, "r": self._request, "j": self._job, "k": self._lock}
        session.script = scripts[session.letter](session)
        return session

    def _file(self, session: _Session) -> Iterator[str]:
        name, user, mode = session.name, session.user, session.mode
        yield f"{name} open {user} {mode}"
        for _ in range(self._random.randint(1, 5)):
            event = self._random.choice(("read", "write")) if mode == "rw" else "read"
            yield f"{name} {event} {user}"
        yield f"{name} close {user}"

    def _request(self, session: _Session) -> Iterator[str]:
        yield f"{session.name} get p{session.path}"
        for _ in range(self._random.randint(0, 2)):
            yield f"{session.name} query"
        yield session.reply(session.path + self._random.randint(0, 1))

    def _job(self, session: _Session) -> Iterator[str]:
        for attempt in (1, 2, 3):
            yield f"{session.name} run {attempt}"
            if self._random.random() < 0.6:
                yield f"{session.name} done {attempt}"
                return
            yield f"{session.name} {'dead' if attempt == 3 else 'fail'} {attempt}"

    def _lock(self, session: _Session) -> Iterator[str]:
        yield f"{session.name} take {session.user}"
        yield f"{session.name} free {session.user}"

    def anomaly(self, kind: str) -> str | None:
        """Return a line with an anomaly of this kind; None: no session allows one now."""
        opened = [session for session in self._slots if session is not None]
        names = {session.name for session in opened}
        recent = {session.name for session in self._ended}
        letter = self._random.choice([*SLOTS])
        unopened = [name for name in self._free(letter) if name not in recent]
        found: list[_Session] = {
            "unopened": [self._session(self._random.choice(unopened))] if unopened else [],
            "closed": [session for session in self._ended if session.name not in names],
            "reopened": opened,
            "user": [session for session in opened if session.letter in "fk"],
            "repeat": [session for session in opened if session.event in ("run", "fail", "get")],
            "read_only": [x for x in opened if x.letter == "f" and x.mode == "ro"],
            "latency": [session for session in opened if session.letter == "r"],
        }[kind]
        if not found:
            return None
        session = self._random.choice(found)
        if kind == "reopened":
            begun = self._session(session.name)
            begun.last = next(begun.script)
            # The session that did not end is not heard of again.
            self._slots[self._slots.index(session)] = begun
            return begun.last
        if kind == "repeat":
            return session.last
        if kind == "read_only":
            return f"{session.name} write {session.user}"
        if kind == "latency":
            own = (session.path, session.path + 1)
            return session.reply(self._random.choice([n for n in range(PATHS + 1) if n not in own]))
        if kind == "user":
            others = [user for n in range(USERS) if (user := f"u{n}") != session.user]
            session = replace(session, user=self._random.choice(others))
        return self._later(session)

    def _later(self, session: _Session) -> str:
        """Return a line of a session that is not its first."""
        return self._random.choice(
            {
                "f": [f"{session.name} {event} {session.user}" for event in ("read", "close")],
                "r": [f"{session.name} query", session.reply(session.path)],
                "j": [f"{session.name} {event} 1" for event in ("done", "fail")],
                "k": [f"{session.name} free {session.user}"],
            }[session.letter]
        )


def log_lines(n: int, *, seed: int, anomalies: float = 0.0) -> Iterator[Line]:
    """Yield the lines of a log.

    Args:
        n: Number of lines.
        seed: Random seed; the same seed gives the same log.
        anomalies: Share of the lines with an anomaly, of each of `ANOMALIES` about as many.
    """
    log, chance = _Log(seed), random.Random(f"anomalies {seed}")
    for _ in range(n):
        kind = chance.choice([*ANOMALIES]) if chance.random() < anomalies else None
        text = None if kind is None else log.anomaly(kind)
        yield Line(log.line(), None) if text is None else Line(text, kind)


def template(text: str) -> str:
    """Return a line without its parameters: each number is an asterisk."""
    return re.sub(r"\d+", "*", text)
