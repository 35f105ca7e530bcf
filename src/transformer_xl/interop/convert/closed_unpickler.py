"""Read the pickle in a file of ``torch.save``, or a plain one, without executing anything.

This file is a program of its own, with the standard library alone, so that the system limits its
memory and its time::

    python -I -S closed_unpickler.py FILE BYTES_OF_MEMORY SECONDS

It writes one object in JSON: ``{"error": text}``, or ``{"value": ..., "storages": ...}``, where the
value is a text, in JSON again. Names in the pickle are looked up in the closed tables of this file,
whose classes and functions hold what the file says; nothing is imported or called. Numbers of
tensors are not read: their storages are byte ranges of the file. Values become JSON as follows;
arrays of NumPy, which hold corpora, are objects without a state::

    dict       {"dict": [[key, ...], [value, ...]]}      bytes    {"bytes": text in Latin-1}
    tuple      {"tuple": [...]}                          object   {"object": [class, state]}
    set        {"set": [...]}
    tensor     {"tensor": [storage, first number, type, offset, size, stride]}

Since version 1.6 files of ``torch.save`` are zip archives: ``<name>/data.pkl``, ``byteorder``,
``data/0``, ``data/1``, ... Before, they were consecutive pickles (a magic number, a version, the
machine, the object, the keys of its storages), followed by a count and the numbers of each storage.
"""

import json
import pickle
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_HEADER_SIZE = 30
_MAX_DEPTH = 200
_MAX_BITS = 4_096
_BIG_ENDIAN = (
    "its numbers have the byte order of a big-endian machine: load it there, and save the state "
    "dict with safetensors"
)

_ENCODINGS = {"latin1": "latin-1", "latin-1": "latin-1", "utf8": "utf-8", "utf-8": "utf-8"}

# The types of numbers and their sizes in bytes, by their names and those of storages in torch.
_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1, "uint8": 1}
_SIZES |= {"int8": 1, "int16": 2, "int32": 4, "int64": 8}
_OTHER_NAMES = {"half": "float16", "float": "float32", "double": "float64", "short": "int16"}
_OTHER_NAMES |= {"int": "int32", "long": "int64", "bool": "bool", "char": "int8", "byte": "uint8"}
_DTYPES = {name: name for name in _SIZES} | _OTHER_NAMES
_DTYPES |= {f"{name.title()}Storage": dtype for name, dtype in _OTHER_NAMES.items()}
_DTYPES |= {"BFloat16Storage": "bfloat16", "UntypedStorage": "uint8"}


class RefusedError(Exception):
    """The file is damaged, of another kind, or hostile."""


def printable(x: object) -> str:
    """Return a short text for a value of a file, without line breaks or control characters."""
    text = ascii(x[:120]) if isinstance(x, str | bytes) else f"a value of type {type(x).__name__}"
    return text.strip("'") if isinstance(x, str) else text


class Stored:
    """An object of a class of the old code: its state, without the class."""

    kind = ""
    args: tuple[object, ...] = ()
    state: object = None

    def __new__(cls, *args: object) -> "Stored":
        """Keep the arguments of the constructor."""
        stored = object.__new__(cls)
        stored.args = args
        return stored

    def __setstate__(self, state: object) -> None:
        # Attributes in slots are stored separately.
        if type(state) is tuple and len(state) == 2 and type(state[1]) is dict:
            state = (state[0] or {}) | state[1]
        self.state = state

    def extend(self, elements: object) -> None:
        """Drop elements, of a subclass of a list or of a dictionary."""

    append = extend

    def __setitem__(self, key: object, value: object) -> None:
        pass


class Array(Stored):
    """An array of NumPy, without its numbers."""

    kind = "numpy.ndarray"

    def __setstate__(self, state: object) -> None:
        pass


class Mapping(dict):
    """A dictionary of any class, without further attributes."""

    def __init__(self, *args: object) -> None:
        # The first argument of a defaultdict is a class.
        super().__init__(*(x for x in args if isinstance(x, dict | list | tuple)))

    def __setstate__(self, state: object) -> None:
        pass


class Function:
    """The replacement of a function that a file can call."""

    def __init__(self, make: Callable[..., object]) -> None:
        self._make = make

    def __setstate__(self, state: object) -> None:
        raise RefusedError("refused: the file changes something that is not its own object")

    def __call__(self, *args: object) -> object:
        """Return what the replacement makes."""
        return self._make(*args)


class Dtype(NamedTuple):
    """A type of numbers, or the storage class of that type."""

    name: str


class Storage(NamedTuple):
    """Numbers of tensors; ``first`` is where a part of them begins."""

    key: str
    dtype: str
    numel: int
    first: int = 0


class Tensor:
    """A tensor on a storage."""

    def __init__(
        self,
        storage: Storage,
        offset: object,
        size: Iterable[object],
        stride: Iterable[object],
        *others: object,
    ) -> None:
        # Only the newest of three formats has the type of its numbers.
        dtype = next((x.name for x in others if isinstance(x, Dtype)), storage.dtype)
        self.parts = storage.key, storage.first, dtype, offset, list(size), list(stride)

    def __setstate__(self, state: object) -> None:
        pass


_NUMBERS = {"b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I"}
_NUMBERS |= {"u8": "Q", "f2": "e", "f4": "f", "f8": "d"}


def _number(dtype: Any, data: str | bytes) -> object:
    """Return a number of NumPy as one of Python."""
    content = data.encode("latin-1") if isinstance(data, str) else data
    return struct.unpack(dtype.state[1].replace("|", "<") + _NUMBERS[dtype.args[0]], content)[0]


def _nested_file(*_: object) -> None:
    raise RefusedError(
        "refused: tensors were pickled without torch.save, which nests one file in another; load "
        "the file with the program that wrote it and save it with torch.save"
    )


_CLASSES: dict[str, object] = {
    f"builtins.{kind.__name__}": kind
    for kind in (bool, int, float, str, bytes, bytearray, list, tuple, set, frozenset)
}
_CLASSES |= {"builtins.unicode": str, "builtins.long": int, "torch.Size": tuple}
_CLASSES |= dict.fromkeys(
    ("builtins.dict", *(f"collections.{x}" for x in ("OrderedDict", "Counter", "defaultdict"))),
    Mapping,
)
_CLASSES |= {
    "numpy.ndarray": Array,
    # Bytes, which Python 3 pickles for Python 2 as a text.
    "_codecs.encode": Function(lambda text, encoding: text.encode(_ENCODINGS[encoding])),
    "copyreg._reconstructor": Function(lambda cls, base, state: cls()),
    "copyreg.__newobj__": Function(lambda cls, *args: cls(*args)),
    "numpy._core.multiarray._reconstruct": Function(lambda *_: Array()),
    "numpy._core.numeric._frombuffer": Function(lambda *_: Array()),
    "numpy._core.multiarray.scalar": Function(_number),
    "torch._utils._rebuild_tensor": Tensor,
    "torch._utils._rebuild_tensor_v2": Tensor,
    "torch._utils._rebuild_tensor_v3": Tensor,
    "torch._tensor._rebuild_from_type_v2": Function(lambda make, cls, args, state: Tensor(*args)),
    "torch.storage._load_from_bytes": Function(_nested_file),
}
_CLASSES |= dict.fromkeys(
    (
        *("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"),
        *("torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"),
    ),
    Function(lambda data, *_: data),
)
# Modules of the authors, of NVIDIA and of Hugging Face, which forks have in other packages; classes
# of scripts; what else their objects hold.
_KNOWN = re.compile(
    r"(.*\.)?(mem_transformer|(proj_)?adaptive_softmax|log_uniform_sampler|data_utils|vocabulary"
    r"|data_parallel|exp_utils|lamb|(modeling|tokenization|configuration)_transfo_xl"
    r"|modeling_transfo_xl_utilities)\.[^.]+"
    r"|__main__\.(MemTransformerLM|AdaptiveEmbedding|Position\w+|\w*MultiHeadAttn|\w*DecoderLayer"
    r"|ProjectedAdaptiveLogSoftmax|LogUniformSampler|Corpus|LM\w+Iterator|Vocab)"
    r"|(torch\.(nn\.(modules|backends|parallel|functional)|optim|cuda\.amp)|apex|transformers"
    r"|pytorch_transformers|pytorch_pretrained_bert|tokenizers|sacremoses|_?regex|collections)\..*"
    r"|argparse\.Namespace|types\.SimpleNamespace|re\._compile|torch\.(Tensor|device)|numpy\.dtype"
    r"|pathlib\.(_local\.)?(Posix|Windows)?Path|builtins\.(object|complex)"
)
# Python 2 and NumPy 1 have other names for some modules.
_RENAMED = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
}


class ClosedUnpickler(pickle.Unpickler):
    """Python's unpickler, with closed tables in place of imports."""

    def __init__(self, file: BinaryIO) -> None:
        # Texts of Python 2 can be bytes of any kind.
        super().__init__(file, encoding="latin-1")
        self.storages: dict[str, Storage] = {}
        self._classes: dict[str, object] = dict(_CLASSES)

    def find_class(self, module: str, name: str) -> object:
        """Return the stand-in for a name."""
        module = _RENAMED.get(module, module)
        kind = f"{module}.{name}"
        if module in ("torch", "torch.cuda", "torch.storage") and name in _DTYPES:
            return Dtype(_DTYPES[name])
        if kind not in self._classes:
            if len(kind) > 1000 or not _KNOWN.fullmatch(kind):
                raise RefusedError(
                    f"refused: the file names {printable(kind)}, which no Transformer-XL "
                    "checkpoint needs; nothing was executed"
                )
            self._classes[kind] = type("Class", (Stored,), {"kind": kind})
        return self._classes[kind]

    def persistent_load(self, pid: object) -> object:
        """Return what the pickle refers to: a storage, a part of one, or a module."""
        match pid:
            case ("module", module, _, _):
                # For a module, the source code of its class is in the reference, too.
                return module
            case ("storage", Dtype(name=dtype), str(key), _, int(numel), *view):
                pass
            case ("storage", str(kind), str(key), _, int(numel), *view) if kind in _DTYPES:
                # Some versions wrote the name of the type instead of the type.
                dtype = _DTYPES[kind]
            case _:
                key, dtype, numel, view = "", "", -1, []
        storage = self.storages.setdefault(key, Storage(key, dtype, numel))
        if storage == (key, dtype, numel, 0) and 0 <= numel < 2**60:
            match view:
                case [] | [None]:
                    return storage
                case [(str(), int(first), int(length))] if 0 <= first <= first + length <= numel:
                    return Storage(key, dtype, numel, first)
        raise RefusedError("its pickle refers to no storage, or to one of two sizes or types")


class _Encoder:
    """Turns values into JSON, up to a size: a file can hold one of them any number of times."""

    def __init__(self, n_bytes: int) -> None:
        self._n_left = (16 << 20) + 20 * n_bytes

    def encode(self, x: object, depth: int = 0) -> object:
        """Return a value as JSON has it."""
        self._n_left -= 16 + (len(x) if isinstance(x, str | bytes | bytearray) else 0)
        is_large = self._n_left < 0 or (isinstance(x, int) and x.bit_length() > _MAX_BITS)
        if depth > _MAX_DEPTH or is_large:
            raise RefusedError(
                "refused: its values are larger than a file of its size can need, or nested "
                "without end"
            )
        match x:
            case None | bool() | int() | float() | str():
                return x
            case list():
                return self._each(x, depth)
            case dict():
                return {"dict": [self._each(x.keys(), depth), self._each(x.values(), depth)]}
            case tuple():
                return {"tuple": self._each(x, depth)}
            case set() | frozenset():
                return {"set": self._each(x, depth)}
            case bytes() | bytearray():
                return {"bytes": x.decode("latin-1")}
            case Tensor():
                return {"tensor": self._each(x.parts, depth)}
            case Stored():
                return {"object": [x.kind, self.encode(x.state, depth + 1)]}
        # A class or function that is only named.
        return {"object": [getattr(x, "kind", type(x).__name__), None]}

    def _each(self, values: Iterable[object], depth: int) -> list[object]:
        return [self.encode(x, depth + 1) for x in values]


_Storages = dict[str, tuple[str, int, int]]


def read(path: Path) -> dict[str, object]:
    """Return the value in a file, and where the numbers of its tensors are."""
    n_bytes = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(300)
        file.seek(0)
        if head[:4] == b"PK\x03\x04":
            value, storages = _read_zip(file, n_bytes)
        elif _MAGIC.to_bytes(10, "little") in head[:64]:
            value, storages = _read_legacy(file, n_bytes)
        else:
            value, storages = ClosedUnpickler(file).load(), {}
            if file.tell() != n_bytes:
                raise RefusedError("it has data after the pickle: it is damaged")
    return {"value": json.dumps(_Encoder(n_bytes).encode(value)), "storages": storages}


def _read_zip(file: BinaryIO, n_bytes: int) -> tuple[object, _Storages]:
    try:
        entries = _zip_entries(file, n_bytes)
    except zipfile.BadZipFile as error:
        raise RefusedError(
            f"it is not a whole archive ({error}): it was not copied completely, or is damaged"
        ) from error
    pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    prefix = pickles[0].removesuffix("data.pkl") if pickles else ""
    of_programs = (f"{prefix}constants.pkl", f"{prefix}code/")
    if len(pickles) != 1 or any(name.startswith(of_programs) for name in entries):
        raise RefusedError(
            "it is a zip archive of another kind, such as one of TorchScript, which is a program: "
            "give a file that torch.save wrote of the model or of its state dict"
        )
    if order := entries.get(f"{prefix}byteorder"):
        file.seek(order[0])
        if file.read(order[1]) != b"little":
            raise RefusedError(_BIG_ENDIAN)
    start, length = entries[pickles[0]]
    file.seek(start)
    unpickler = ClosedUnpickler(file)
    value = unpickler.load()
    if file.tell() > start + length:
        raise RefusedError("its pickle does not end in its entry: it was not copied completely")
    storages = {}
    for key, storage in unpickler.storages.items():
        start, length = entries.get(f"{prefix}data/{key}", (0, -1))
        if length != storage.numel * _SIZES[storage.dtype]:
            raise RefusedError(f"storage {printable(key)} has another size than its tensors")
        storages[key] = storage.dtype, start, length
    return value, storages


def _zip_entries(file: BinaryIO, n_bytes: int) -> dict[str, tuple[int, int]]:
    """Return the position and length of each entry of an archive; they must not overlap."""
    entries: dict[str, tuple[int, int]] = {}
    free = 0
    archive = zipfile.ZipFile(file)
    for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
        name, offset = printable(info.filename), info.header_offset
        if info.flag_bits & 1 or info.compress_type or info.file_size != info.compress_size:
            raise RefusedError(f"its entry {name} is compressed or encrypted: unpack it first")
        file.seek(offset + _HEADER_SIZE - 4)
        start = offset + _HEADER_SIZE + sum(struct.unpack("<HH", file.read(4)))
        if info.filename in entries or offset < free or start + info.file_size > n_bytes:
            raise RefusedError(f"its entry {name} is there twice, overlaps another or is cut")
        # Opening compares the header of the entry with the directory, reading its checksum;
        # zero means none (torch.serialization.set_crc32_options).
        with archive.open(info) as content:
            while info.CRC and content.read(1 << 20):
                pass
        free = start + info.file_size
        entries[info.filename] = start, info.file_size
    return entries


def _read_legacy(file: BinaryIO, n_bytes: int) -> tuple[object, _Storages]:
    if ClosedUnpickler(file).load() != _MAGIC or ClosedUnpickler(file).load() != _PROTOCOL:
        raise RefusedError("it is of an unknown version, or damaged")
    if ClosedUnpickler(file).load()["little_endian"] is not True:
        raise RefusedError(_BIG_ENDIAN)
    unpickler = ClosedUnpickler(file)
    value = unpickler.load()
    storages = {}
    for key in ClosedUnpickler(file).load():
        storage = unpickler.storages[key]
        numel = int.from_bytes(file.read(8), "little", signed=True)
        start, length = file.tell(), storage.numel * _SIZES[storage.dtype]
        if numel != storage.numel or start + length > n_bytes:
            raise RefusedError(
                f"storage {printable(key)} has another size than its tensors, or the file was not "
                "copied completely"
            )
        storages[key] = storage.dtype, start, length
        file.seek(start + length)
    return value, storages


def _limit_process(n_bytes: int, seconds: int) -> None:
    """Limit the memory and processor time of this process, and disable core dumps.

    Has no effect on a system without the limits, such as Windows.
    """
    with suppress(ImportError):
        import resource

        kinds = resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_CORE
        for kind, limit in zip(kinds, (n_bytes, seconds, 0), strict=True):
            _, hard = resource.getrlimit(kind)
            # The soft limit cannot exceed the hard one, such as that of a shell with `ulimit -v`.
            soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            with suppress(ValueError, OSError):
                resource.setrlimit(kind, (soft, hard))


def main() -> None:
    """Read the file of the command line; write what is in it to the standard output."""
    path, n_bytes, seconds = sys.argv[1:]
    _limit_process(int(n_bytes), int(seconds))
    try:
        text = json.dumps(read(Path(path)))
    except MemoryError:
        text = json.dumps({"error": "refused: its pickle takes more memory than any checkpoint's"})
    except RefusedError as error:
        text = json.dumps({"error": str(error)})
    except Exception as error:  # noqa: BLE001
        cause = f"{type(error).__name__}: {printable(str(error))}"
        text = json.dumps(
            {"error": f"it is damaged or of another kind ({cause}): get a fresh copy"}
        )
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
