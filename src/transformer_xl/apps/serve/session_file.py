"""A session as such: its name, its size, its file, and why it cannot be had."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformer_xl.inference.generate import State

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
