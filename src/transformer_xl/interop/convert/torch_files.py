"""Files of ``torch.save`` and plain pickles, read by a child process that executes nothing.

The child (:mod:`transformer_xl.interop.convert.closed_unpickler`) has a limit on memory and on
time, and returns JSON. Tensors are made here, on the memory-mapped file.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from transformer_xl.errors import CheckpointError
from transformer_xl.interop.convert import closed_unpickler
from transformer_xl.interop.convert.mapped_files import checked_size, map_file, on_file, reading

# Bytes of memory and seconds of processor time for a small file, and for each byte of a large one.
_MEMORY, _MEMORY_PER_BYTE = 1 << 30, 4
_SECONDS, _BYTES_PER_SECOND = 8, 50_000_000
# Limits of modules, and of tensors, of one module.
_MAX_PARTS = 100_000
_MAX_NAME = 1000

_T = TypeVar("_T")


@dataclass(eq=False, repr=False, slots=True)
class Instance:
    """The stored state of an object of a class of the old code, without the class.

    Its values come from a file that can be hostile: check their types before they are used.
    """

    kind: str
    """Module and name of its class, such as ``mem_transformer.MemTransformerLM``."""
    state: object = None
    """Its attributes, usually a dictionary; None if there are none."""


def attributes(content: object) -> dict[object, Any]:
    """Return the attributes of an instance, or a dictionary itself; else an empty one."""
    state = content.state if isinstance(content, Instance) else content
    return state if isinstance(state, dict) else {}


def read_pickled(path: Path | str) -> object:
    """Read a file of ``torch.save``, of either format, or a plain pickle.

    Tensors are memory-mapped: the file must not change while they are in use. Those that are not
    aligned are copied. Objects of classes become :class:`Instance`.

    Raises:
        CheckpointError: The file is damaged, of another kind, names what no checkpoint needs, or
            takes more memory or time to read than a checkpoint does.
    """
    path = Path(path)
    with reading(path):
        data = map_file(path)
        content = _content_of(path, len(data))
        if content.error:
            raise CheckpointError(content.error)
        storages = {
            key: on_file(data, start, n_bytes, getattr(torch, dtype))
            for key, (dtype, start, n_bytes) in content.storages.items()
        }
        # Decoded after the storages are known.
        return json.loads(content.value, object_hook=lambda x: _decoded(x, storages))


class _Content(msgspec.Struct):
    """What the child process writes."""

    error: str = ""
    value: str = ""
    storages: dict[str, tuple[str, int, int]] = {}


def _content_of(path: Path, n_bytes: int) -> _Content:
    memory = _MEMORY + _MEMORY_PER_BYTE * n_bytes
    seconds = _SECONDS + n_bytes // _BYTES_PER_SECOND
    program = [sys.executable, "-I", "-S", closed_unpickler.__file__]
    command = [*program, str(path.absolute()), str(memory), str(seconds)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=4 * seconds
        )
        return msgspec.json.decode(done.stdout, type=_Content)
    except (subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"refused: its pickle takes more than {seconds} s or {memory >> 20:,} MB of memory to "
            "read, which no checkpoint needs, or crashes its reader"
        ) from error


def _decoded(coded: dict[str, Any], storages: dict[str, Tensor]) -> object:
    """Return the value for an object in the JSON of the child process."""
    ((kind, content),) = coded.items()
    match kind:
        case "dict":
            return dict(zip(*content, strict=True))
        case "tuple":
            return tuple(content)
        case "set":
            return frozenset(content)
        case "bytes":
            return content.encode("latin-1")
        case "object":
            return Instance(*content)
        case _:
            key, *place = content
            return _tensor(storages[key], *place)


def _tensor(
    numbers: Tensor, first: int, dtype: str, offset: object, size: object, stride: object
) -> Tensor:
    """Return a tensor on the bytes of a storage; check that it is within them."""
    kind: torch.dtype = getattr(torch, dtype)
    available = len(numbers) // kind.itemsize
    size = checked_size(size, available)
    places = [offset, *stride] if isinstance(stride, list) else []
    valid = [n for n in places if type(n) is int and 0 <= n < 2**62]
    if not len(valid) == len(places) == len(size) + 1:
        raise CheckpointError("a tensor has a damaged offset or stride")
    offset, *stride = valid
    first += offset
    steps = [(n - 1) * step for n, step in zip(size, stride, strict=True)]
    if (
        (first if 0 in size else first + sum(steps) + 1) > available
        # Repeated numbers take no room in a file, and much in memory.
        or any(n > 1 and not step for n, step in zip(size, stride, strict=True))
    ):
        raise CheckpointError(
            f"a tensor repeats numbers, or reaches beyond the {available:,} numbers stored"
        )
    flat = numbers[: available * kind.itemsize].view(kind)
    return flat.as_strided(size, stride, flat.storage_offset() + first)


def module_tensors(module: Instance) -> dict[str, Tensor]:
    """Return the ``state_dict`` of a pickled module."""
    tensors: dict[str, Tensor] = {}
    waiting = [("", module)]
    n_modules = 0
    while waiting:
        prefix, current = waiting.pop()
        n_modules += 1
        if len(prefix) > _MAX_NAME or max(n_modules, len(tensors)) > _MAX_PARTS:
            raise CheckpointError("the module is nested absurdly deep")
        state = attributes(current)
        hidden = state.get("_non_persistent_buffers_set")
        hidden = hidden if isinstance(hidden, frozenset) else ()
        buffers = _named(state, "_buffers", Tensor)
        named = {name: x for name, x in buffers.items() if name not in hidden}
        # Parameter lists of torch 1.12 and later keep other values as attributes "0", "1", ...
        names = [name for name in state if isinstance(name, str) and name.isdigit()]
        named |= {name: state[name] for name in names if isinstance(state[name], Tensor)}
        named = _named(state, "_parameters", Tensor) | named
        tensors |= {prefix + name: x for name, x in named.items()}
        # Reversed, because the last one is popped first.
        children = _named(state, "_modules", Instance).items()
        waiting += [(f"{prefix}{name}.", child) for name, child in reversed(children)]
    return tensors


def _named(state: Mapping[object, object], key: str, kind: type[_T]) -> dict[str, _T]:
    # Registered names without a value are None.
    named = {name: x for name, x in attributes(state.get(key)).items() if x is not None}
    valid = {name: x for name, x in named.items() if isinstance(name, str) and isinstance(x, kind)}
    if len(valid) < len(named):
        raise CheckpointError(f"{key} of a module has something other than a {kind.__name__}")
    return valid
