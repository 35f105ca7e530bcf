"""Files of ``torch.save``, read without ``torch.load``, which would run what they name.

Since version 1.6 they are zip archives, with a pickle and an entry for each storage::

    <name>/data.pkl    <name>/byteorder    <name>/data/0    <name>/data/1  ...

Before, they were pickles one behind the other (a magic number, a version, the machine, the object,
the keys of its storages), and then for each key a count and the numbers.
"""

import mmap
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch import Tensor

from transformer_xl.interop.convert.inert import (
    Global,
    Instance,
    UnreadableFile,
    map_file,
    printable,
    reading,
)
from transformer_xl.interop.convert.pickles import load_pickle
from transformer_xl.interop.convert.storages import STORAGE_DTYPES, Storage

_ZIP = b"PK\x03\x04"
_MAGIC = 0x1950A86A20F9469CFC6C
_MAGIC_BYTES = _MAGIC.to_bytes(10, "little")
_PROTOCOL = 1001
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
# Modules, and tensors, of one module.
_MAX_PARTS = 100_000
_MAX_MODULE_DEPTH = 64
_MAX_NAME = 1000

_T = TypeVar("_T")


def read_torch(path: Path | str) -> object:
    """Read a file of ``torch.save``, of either format.

    Tensors lie on the file, which must not change while they are in use; those of the older format
    are copied where processors do not allow it. Objects of classes become
    :class:`~transformer_xl.interop.convert.inert.Instance`.

    Raises:
        FileNotFoundError: There is no such file.
        PermissionError: The file may not be read.
        UnreadableFile: It is damaged, of another kind, or names what no checkpoint needs.
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
        raise UnreadableFile(f"{path} is no file of torch.save, but {kind}: {remedy}")


def read_pickle(path: Path | str) -> object:
    """Read a file of ``pickle.dump``.

    Raises:
        FileNotFoundError: There is no such file.
        PermissionError: The file may not be read.
        UnreadableFile: It is damaged, of another kind, or names what no vocabulary needs.
    """
    path = Path(path)
    with reading(path):
        data = map_file(path)
        if data[:4] == _ZIP or _MAGIC_BYTES in data[:64]:
            raise UnreadableFile(f"{path} is a file of torch.save: read_torch reads it")
        value, end = load_pickle(data)
        if end != len(data):
            raise UnreadableFile(
                f"{path} goes on behind its pickle, which ends at byte {end:,}: it is of another "
                "kind or damaged"
            )
        return value


def _read_zip(path: Path, data: mmap.mmap) -> object:
    entries = _zip_entries(path, data)
    pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise UnreadableFile(f"{path} is a zip archive that torch.save did not write")
    prefix = pickles[0].removesuffix("data.pkl")
    if f"{prefix}constants.pkl" in entries or any(x.startswith(f"{prefix}code/") for x in entries):
        raise UnreadableFile(
            f"{path} is a TorchScript archive, which is a program: give a file that torch.save "
            "wrote of the model or of its state dict"
        )
    if order := entries.get(f"{prefix}byteorder"):
        _require_little(data[order.start : order.end] == b"little")
    storages: dict[str, Storage] = {}

    def persistent_load(reference: object) -> Storage:
        declared, key, _ = _declared(reference)
        if key not in storages:
            entry = entries.get(f"{prefix}data/{key}")
            if entry is None or entry.end - entry.start != declared.n_bytes:
                raise UnreadableFile(
                    f"storage {printable(key)} does not have the {declared.n_bytes:,} bytes that "
                    "its tensors need"
                )
            declared.place(data, entry.start)
            storages[key] = declared
        return _same(storages[key], declared)

    entry = entries[pickles[0]]
    return load_pickle(data, persistent_load, entry.start, entry.end)[0]


class _Entry(NamedTuple):
    start: int
    end: int


def _zip_entries(path: Path, data: mmap.mmap) -> dict[str, _Entry]:
    """Find the entries of an archive and check that each has a part of the file to itself."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = sorted(archive.infolist(), key=lambda info: info.header_offset)
            limit: int = archive.start_dir  # pyright: ignore[reportAttributeAccessIssue]
    except zipfile.BadZipFile as error:
        raise UnreadableFile(
            f"{path} has no whole directory at its end ({error}): it was not copied completely, or "
            "it is damaged"
        ) from error
    entries: dict[str, _Entry] = {}
    free = 0
    for info in found:
        name = printable(info.filename)
        offset = info.header_offset
        if info.flag_bits & 1 or info.compress_type or info.file_size != info.compress_size:
            raise UnreadableFile(f"its entry {name} is compressed or encrypted: unpack it first")
        if offset < free or offset + _LOCAL_HEADER.size > limit:
            raise UnreadableFile(f"its entry {name} overlaps with another or lies outside")
        signature, _, flags, method, *_, name_len, extra_len = _LOCAL_HEADER.unpack_from(
            data, offset
        )
        start = offset + _LOCAL_HEADER.size + name_len + extra_len
        free = start + info.file_size
        local_name = data[start - name_len - extra_len : start - extra_len]
        local_name = local_name.decode("utf-8" if flags & 0x800 else "cp437")
        if signature != _ZIP or method or local_name != info.orig_filename:
            raise UnreadableFile(f"its entry {name} is not where the directory says")
        if free > limit:
            raise UnreadableFile(f"its entry {name} does not fit into the file")
        if info.filename in entries:
            raise UnreadableFile(f"its entry {name} is there twice")
        # A zero stands for no checksum (torch.serialization.set_crc32_options).
        with memoryview(data) as whole, whole[start:free] as content:
            if info.CRC and zlib.crc32(content) != info.CRC:
                raise UnreadableFile(
                    f"{path} is damaged: the checksum of its entry {name} is another; get a fresh "
                    "copy of it"
                )
        entries[info.filename] = _Entry(start, free)
    return entries


def _read_legacy(data: mmap.mmap) -> object:
    magic, end = load_pickle(data)
    version, end = load_pickle(data, start=end)
    if magic != _MAGIC or version != _PROTOCOL:
        raise UnreadableFile("it is of an unknown version, or damaged")
    machine, end = load_pickle(data, start=end)
    _require_little(isinstance(machine, dict) and machine.get("little_endian") is True)
    storages: dict[str, Storage] = {}
    parts: dict[str, tuple[Storage, str, int]] = {}

    def persistent_load(reference: object) -> object:
        if isinstance(reference, tuple) and len(reference) == 4 and reference[0] == "module":
            # The text of the class is written, too.
            return reference[1]
        declared, key, part = _declared(reference)
        storage = _same(storages.setdefault(key, declared), declared)
        if part is None:
            return storage
        name, first, numel = part
        if type(name) is not str or type(first) is not int or type(numel) is not int or numel < 0:
            raise UnreadableFile("a part of a storage is damaged")
        if name not in parts:
            parts[name] = Storage(storage.dtype, numel), key, first
        return parts[name][0]

    value, end = load_pickle(data, persistent_load, start=end)
    keys, end = load_pickle(data, start=end)
    if not isinstance(keys, list) or any(type(key) is not str for key in keys):
        raise UnreadableFile("the list of its storages is damaged")
    if len(set(keys)) != len(keys) or set(keys) != storages.keys():
        raise UnreadableFile("the list of its storages is not that of its tensors")
    for key in keys:
        storage = storages[key]
        if len(data) - end < 8:
            raise UnreadableFile("it ends before its numbers: it was not copied completely")
        if int.from_bytes(data[end : end + 8], "little", signed=True) != storage.numel:
            raise UnreadableFile(f"storage {printable(key)} has another size than its tensors")
        storage.place(data, end + 8)
        end += 8 + storage.n_bytes
    for part, key, first in parts.values():
        part.place_on(storages[key], first)
    return value


def _declared(reference: object) -> tuple[Storage, str, tuple | None]:
    """Return the storage that a pickle refers to, its key, and which part of it is meant."""
    if (
        not isinstance(reference, tuple)
        or len(reference) not in (5, 6)
        or reference[0] != "storage"
    ):
        raise UnreadableFile("its pickle refers to something that is no storage")
    _, kind, key, _, numel, *rest = reference
    # Some versions named the type instead of giving it.
    name = kind.name if isinstance(kind, Global) else kind
    dtype = STORAGE_DTYPES.get(name) if type(name) is str else None
    if dtype is None:
        raise UnreadableFile(f"its numbers are of the unsupported type {printable(name)}")
    if type(key) is not str or type(numel) is not int or not 0 <= numel < 2**60:
        raise UnreadableFile("its pickle refers to a storage of absurd size or without a name")
    part = rest[0] if rest else None
    if part is not None and (not isinstance(part, tuple) or len(part) != 3):
        raise UnreadableFile("a part of a storage is damaged")
    return Storage(dtype, numel), key, part


def _same(storage: Storage, declared: Storage) -> Storage:
    if storage.dtype != declared.dtype or storage.numel != declared.numel:
        raise UnreadableFile("its pickle gives a storage two sizes or types")
    return storage


def _require_little(is_little: bool) -> None:
    if not is_little:
        raise UnreadableFile(
            "its numbers have the byte order of a big-endian machine: load it there, and save the "
            "state dict with safetensors"
        )


def module_tensors(module: Instance) -> dict[str, Tensor]:
    """Return what the ``state_dict`` of a pickled module was.

    Raises:
        UnreadableFile: It is no module, or contains itself.
    """
    tensors: dict[str, Tensor] = {}
    waiting = [("", module, 0)]
    n_modules = 0
    while waiting:
        prefix, current, depth = waiting.pop()
        n_modules += 1
        if depth > _MAX_MODULE_DEPTH or n_modules > _MAX_PARTS:
            raise UnreadableFile("the module contains itself, or is nested absurdly deep")
        if not isinstance(current.state, dict):
            raise UnreadableFile(f"{printable(current.kind)} is no module: it has no attributes")
        for name, tensor in _own_tensors(current.state):
            _add(tensors, prefix + name, tensor)
        children = _named(current.state, "_modules", Instance)
        # The last is taken first.
        waiting += [(f"{prefix}{name}.", x, depth + 1) for name, x in reversed(list(children))]
    return tensors


def _own_tensors(state: dict) -> Iterator[tuple[str, Tensor]]:
    yield from _named(state, "_parameters", Tensor)
    # Parameter lists of torch 1.12 and later keep what is no parameter as attributes "0", "1", ...
    yield from ((x, y) for x, y in state.items() if _is_index(x) and isinstance(y, Tensor))
    hidden = state.get("_non_persistent_buffers_set")
    for name, buffer in _named(state, "_buffers", Tensor):
        if not isinstance(hidden, set) or name not in hidden:
            yield name, buffer


def _is_index(name: object) -> bool:
    return isinstance(name, str) and name.isdigit()


def _named(state: dict, key: str, kind: type[_T]) -> Iterator[tuple[str, _T]]:
    found = state.get(key)
    found = found.entries if isinstance(found, Instance) else found
    if found is not None and not isinstance(found, dict):
        raise UnreadableFile(f"{key} of a module is {printable(found)}")
    for name, x in (found or {}).items():
        if not isinstance(name, str) or len(name) > _MAX_NAME:
            raise UnreadableFile(f"{key} of a module has no proper names")
        # Places that are kept free have None.
        if x is not None and not isinstance(x, kind):
            raise UnreadableFile(f"{key} of a module has {printable(x)} at {printable(name)}")
        if x is not None:
            yield name, x


def _add(tensors: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    if len(name) > _MAX_NAME or len(tensors) >= _MAX_PARTS:
        raise UnreadableFile("the module has too many tensors, or names of absurd length")
    tensors.setdefault(name, tensor)
