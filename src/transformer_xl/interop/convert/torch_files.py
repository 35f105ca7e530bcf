"""Files of ``torch.save``, read without ``torch.load``, which can execute code.

Since version 1.6 they are zip archives, with a pickle and an entry for each storage::

    <name>/data.pkl    <name>/byteorder    <name>/data/0    <name>/data/1  ...

Before, they were consecutive pickles (a magic number, a version, the machine, the object, the keys
of its storages), followed by a count and the numbers of each storage.
"""

import mmap
import os
import struct
import zipfile
import zlib
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from transformer_xl.interop.convert.mapped_files import (
    DTYPES,
    Storage,
    UnreadableFile,
    map_file,
    printable,
    reading,
)
from transformer_xl.interop.convert.pickles import Instance, load_pickle

_ZIP = b"PK\x03\x04"
_MAGIC = 0x1950A86A20F9469CFC6C
_MAGIC_BYTES = _MAGIC.to_bytes(10, "little")
_PROTOCOL = 1001
_HEADER_SIZE = 30
# Limits of modules, and of tensors, of one module.
_MAX_PARTS = 100_000
_MAX_NAME = 1000

_T = TypeVar("_T")


def read_torch(path: Path | str) -> object:
    """Read a file of ``torch.save``, of either format.

    Tensors are memory-mapped: the file must not change while they are in use. Those of the older
    format are copied if they are not aligned. Objects of classes become
    :class:`~transformer_xl.interop.convert.pickles.Instance`.
    """
    path = Path(path)
    with reading(path):
        data = map_file(path)
        if data[:4] == _ZIP:
            return _read_zip(path, data)
        if _MAGIC_BYTES in data[:64]:
            return _read_legacy(data)
        if data[257:262] == b"ustar":
            raise UnreadableFile(
                f"{path} is a tar archive, as PyTorch wrote them before 0.1.10: load it there and "
                "save it again with a later version"
            )
        remedy = "read_pickle reads it" if data[:1] == b"\x80" else "give a checkpoint"
        kind = "a plain pickle" if data[:1] == b"\x80" else "of another kind or damaged"
        raise UnreadableFile(f"{path} is not a file of torch.save, but {kind}: {remedy}")


def read_pickle(path: Path | str) -> object:
    """Read a file of ``pickle.dump``."""
    path = Path(path)
    with reading(path):
        data = map_file(path)
        if data[:4] == _ZIP or _MAGIC_BYTES in data[:64]:
            raise UnreadableFile(f"{path} is a file of torch.save: read_torch reads it")
        value = load_pickle(data)
        if data.tell() != len(data):
            raise UnreadableFile(
                f"{path} has data after its pickle, which ends at byte {data.tell():,}: it is of "
                "another kind or damaged"
            )
        return value


def _read_zip(path: Path, data: mmap.mmap) -> object:
    entries = _zip_entries(path, data)
    pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise UnreadableFile(f"{path} is a zip archive that torch.save did not write")
    prefix = pickles[0].removesuffix("data.pkl")
    if any(name.startswith((f"{prefix}constants.pkl", f"{prefix}code/")) for name in entries):
        raise UnreadableFile(
            f"{path} is a TorchScript archive, which is a program: give a file that torch.save "
            "wrote of the model or of its state dict"
        )
    if order := entries.get(f"{prefix}byteorder"):
        _require_little(data[slice(*order)] == b"little")
    storages: dict[str, Storage] = {}
    start, end = entries[pickles[0]]
    data.seek(start)
    value = load_pickle(data, partial(_referred, storages=storages))
    if data.tell() > end:
        raise UnreadableFile("its pickle does not end in its entry: it was not copied completely")
    for key, storage in storages.items():
        start, end = entries.get(f"{prefix}data/{key}", (0, -1))
        if end - start != storage.n_bytes:
            raise UnreadableFile(
                f"storage {printable(key)} does not have the {storage.n_bytes:,} bytes that its "
                "tensors need"
            )
        storage.place(data, start)
    return value


def _zip_entries(path: Path, data: mmap.mmap) -> dict[str, tuple[int, int]]:
    """Return the byte ranges of the entries of an archive, which must not overlap."""
    entries: dict[str, tuple[int, int]] = {}
    free = 0
    try:
        with zipfile.ZipFile(path) as archive:
            for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
                name, offset = printable(info.filename), info.header_offset
                if info.flag_bits & 1 or info.compress_type or info.file_size != info.compress_size:
                    raise UnreadableFile(
                        f"its entry {name} is compressed or encrypted: unpack it first"
                    )
                # Opening checks the local header of the entry against the directory.
                archive.open(info).close()
                start = offset + _HEADER_SIZE + sum(struct.unpack_from("<HH", data, offset + 26))
                end = start + info.file_size
                if offset < free or end > len(data):
                    raise UnreadableFile(f"its entry {name} overlaps another or is out of bounds")
                if info.filename in entries:
                    raise UnreadableFile(f"its entry {name} occurs twice")
                # Zero means no checksum (torch.serialization.set_crc32_options).
                with memoryview(data) as whole, whole[start:end] as content:
                    if info.CRC and zlib.crc32(content) != info.CRC:
                        raise UnreadableFile(
                            f"{path} is damaged: the checksum of its entry {name} is another; get "
                            "a fresh copy of it"
                        )
                entries[info.filename] = start, end
                free = end
    except zipfile.BadZipFile as error:
        raise UnreadableFile(
            f"{path} is not a whole archive ({error}): it was not copied completely, or is damaged"
        ) from error
    return entries


def _read_legacy(data: mmap.mmap) -> object:
    if load_pickle(data) != _MAGIC or load_pickle(data) != _PROTOCOL:
        raise UnreadableFile("it is of an unknown version, or damaged")
    machine = load_pickle(data)
    _require_little(isinstance(machine, dict) and machine.get("little_endian") is True)
    storages: dict[str, Storage] = {}
    value = load_pickle(data, partial(_referred, storages=storages))
    keys = load_pickle(data)
    is_list = isinstance(keys, list) and all(type(key) is str for key in keys)
    if not is_list or sorted(keys) != sorted(storages):
        raise UnreadableFile("the list of its storages is not that of its tensors")
    for key in keys:
        storage = storages[key]
        if int.from_bytes(data.read(8), "little", signed=True) != storage.numel:
            raise UnreadableFile(f"storage {printable(key)} has another size than its tensors")
        storage.place(data, data.tell())
        data.seek(storage.n_bytes, os.SEEK_CUR)
    return value


def _referred(reference: object, storages: dict[str, Storage]) -> object:
    """Return what a pickle refers to: a storage, a part of one, or a module."""
    match reference:
        case ("module", module, _, _):
            # For a module, the source code of its class is in the reference, too.
            return module
        case ("storage", kind, str(key), _, int(numel), *view) if 0 <= numel < 2**60:
            # Some versions wrote the name of the type instead of the type.
            dtype = DTYPES.get(kind) if isinstance(kind, str) else kind
        case _:
            raise UnreadableFile("its pickle refers to something that is not a storage")
    if not isinstance(dtype, torch.dtype):
        raise UnreadableFile(f"its numbers are of the unsupported type {printable(kind)}")
    storage = storages.setdefault(key, Storage(dtype, numel))
    if (storage.dtype, storage.numel) != (dtype, numel):
        raise UnreadableFile("its pickle gives a storage two sizes or types")
    match view:
        case [] | [None]:
            return storage
        case [(str(), int(first), int(length))] if 0 <= first <= first + length <= numel:
            return storage.part(first)
    raise UnreadableFile("a part of a storage is damaged or out of its bounds")


def _require_little(is_little: bool) -> None:
    if not is_little:
        raise UnreadableFile(
            "its numbers have the byte order of a big-endian machine: load it there, and save the "
            "state dict with safetensors"
        )


def module_tensors(module: Instance) -> dict[str, Tensor]:
    """Return the ``state_dict`` of a pickled module."""
    tensors: dict[str, Tensor] = {}
    waiting = [("", module)]
    n_modules = 0
    while waiting:
        prefix, current = waiting.pop()
        n_modules += 1
        if len(prefix) > _MAX_NAME or max(n_modules, len(tensors)) > _MAX_PARTS:
            raise UnreadableFile("the module contains itself, or is nested absurdly deep")
        state = current.state
        if not isinstance(state, dict):
            raise UnreadableFile(f"{printable(current.kind)} is not a module: it has no attributes")
        hidden = state.get("_non_persistent_buffers_set")
        # Parameter lists of torch 1.12 and later keep other values as attributes "0", "1", ...
        own = _named(state, "_parameters", Tensor)
        own |= {
            name: x
            for name, x in state.items()
            if isinstance(x, Tensor) and isinstance(name, str) and name.isdigit()
        }
        for name, buffer in _named(state, "_buffers", Tensor).items():
            if not isinstance(hidden, set) or name not in hidden:
                own[name] = buffer
        tensors |= {prefix + name: x for name, x in own.items()}
        # Reversed, because the last one is popped first.
        children = _named(state, "_modules", Instance).items()
        waiting += [(f"{prefix}{name}.", child) for name, child in reversed(children)]
    return tensors


def _named(state: dict, key: str, kind: type[_T]) -> dict[str, _T]:
    named = state.get(key, {})
    if not isinstance(named, dict | None):
        raise UnreadableFile(f"{key} of a module is {printable(named)}")
    # Registered names without a value are None.
    named = {name: x for name, x in (named or {}).items() if x is not None}
    for name, x in named.items():
        if not isinstance(name, str) or len(name) > _MAX_NAME:
            raise UnreadableFile(f"{key} of a module has no proper names")
        if not isinstance(x, kind):
            raise UnreadableFile(f"{key} of a module has {printable(x)} at {printable(name)}")
    return named
