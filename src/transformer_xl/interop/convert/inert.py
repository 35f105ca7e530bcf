"""What the classes and functions that an old file names become: records that do nothing."""

import json
import mmap
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MAX_JSON_BYTES = 4 << 20


class UnreadableFile(RuntimeError):  # noqa: N818
    """A file is damaged, is of another kind, or asks for something that is refused."""


class Global:
    """A class or a function that a file names and does not call."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    @property
    def kind(self) -> str:
        """Both parts of the name, as in ``torch.nn.functional.relu``."""
        return f"{self.module}.{self.name}"


class Instance:
    """An object of a class of the old code: what was stored of it, without the class.

    Its parts come from a file that may be hostile. They may be nested deeply, be shared many times
    and contain themselves: do not print, compare or copy them before their types are known.

    Args:
        kind: Module and name of its class, as in ``mem_transformer.MemTransformerLM``.
        args: What its constructor was to be called with.
    """

    __slots__ = ("args", "elements", "entries", "kind", "state")

    def __init__(self, kind: str, args: tuple = ()) -> None:
        self.kind = kind
        self.args = args
        self.state: object = None
        """Its attributes, mostly a dictionary; None without."""
        self.entries: dict = {}
        """What it maps, if its class is a kind of dictionary."""
        self.elements: list = []
        """What it holds, if its class is a kind of list or set."""


MAX_DEPTH = 200
_CONTAINERS = {list, tuple, dict, Instance}


def _inside(value: object) -> list:
    if isinstance(value, dict):
        found = [x for x in value.values() if type(x) in _CONTAINERS]
    elif isinstance(value, Instance):
        found = [value.args, value.state, value.entries, value.elements]
        found = [x for x in found if x and type(x) in _CONTAINERS]
    else:
        assert isinstance(value, list | tuple)
        found = [x for x in value if type(x) in _CONTAINERS]
    return found


def check_depth(value: object) -> None:
    """Check that containers are not nested so deeply that recursion would fail.

    Raises:
        UnreadableFile: They are.
    """
    if type(value) not in _CONTAINERS:
        return
    # How far down each container reaches; 0 while its content is looked at, as in a cycle.
    depths: dict[int, int] = {id(value): 0}
    path = [(value, iter(_inside(value)), [0])]
    while path:
        current, rest, deepest = path[-1]
        for other in rest:
            if id(other) not in depths:
                if len(path) >= MAX_DEPTH:
                    raise UnreadableFile(f"refused: values are nested more than {MAX_DEPTH} deep")
                depths[id(other)] = 0
                path.append((other, iter(_inside(other)), [0]))
                break
            deepest[0] = max(deepest[0], depths[id(other)])
        else:
            depths[id(current)] = depth = deepest[0] + 1
            if depth > MAX_DEPTH:
                raise UnreadableFile(f"refused: values are nested more than {MAX_DEPTH} deep")
            path.pop()
            if path:
                path[-1][2][0] = max(path[-1][2][0], depth)


def printable(x: object) -> str:
    """Return a short text for a value of a file: no line break, no control character."""
    # Containers may be of any size and depth.
    text = ascii(x[:120]) if isinstance(x, str | bytes) else f"a value of type {type(x).__name__}"
    return text.strip("'") if isinstance(x, str) else text


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file makes a reader stumble over into :class:`UnreadableFile`.

    Raises:
        FileNotFoundError: There is no such file.
        PermissionError: The file may not be read.
        UnreadableFile: Anything else went wrong; the message names the file.
    """
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except UnreadableFile as error:
        text = str(error)
        if str(path) not in text:
            text = f"{path}: {text}"
        raise UnreadableFile(text) from error.__cause__
    except Exception as error:
        raise UnreadableFile(
            f"{path} is damaged or of another kind ({type(error).__name__}): get a fresh copy of it"
        ) from error


def map_file(path: Path) -> mmap.mmap:
    """Map a file into memory: writable, so that tensors may lie on it, and never written back.

    Raises:
        UnreadableFile: It is empty or no ordinary file.
    """
    mode = path.stat()
    if not stat.S_ISREG(mode.st_mode):
        raise UnreadableFile(f"{path} is no file: give the checkpoint itself")
    if not mode.st_size:
        raise UnreadableFile(f"{path} is empty: get a fresh copy of it")
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file that may be anything.

    Raises:
        FileNotFoundError: There is no such file.
        UnreadableFile: It holds no object, or is too large or too deep to be settings.
    """
    n_bytes = path.stat().st_size
    if n_bytes > _MAX_JSON_BYTES:
        raise UnreadableFile(
            f"{path} has {n_bytes:,} bytes: settings have up to {_MAX_JSON_BYTES:,}; give the "
            "right file"
        )
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(
            f"{path} is no JSON file, or damaged ({error}): restore it from a copy"
        ) from error
    if not isinstance(content, dict):
        raise UnreadableFile(
            f"{path} holds a {type(content).__name__}, not an object: restore it from a copy"
        )
    return content
