"""Read pickles without executing anything, and within a bound on memory.

Python's own unpickler, with other handlers for classes, calls and attributes: a name is looked up
in the tables of this file, whose functions create containers and tensors; nothing is imported. The
objects of a pickle take at most about 64 MB plus 20 times the bytes read so far, besides the
contents of its strings; a vocabulary of the authors takes half of that. A file that would take more
is refused. Arrays of NumPy, which hold corpora, are skipped.
"""

import mmap
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_xl.interop.convert.mapped_files import DTYPES, Storage, UnreadableFile, printable

_MAX_BITS = 4096
_MAX_DEPTH = 200
_MAX_NAME = 1000
# A Python 2 text of this size is the content of an array.
_LONG_TEXT = 1 << 20


@dataclass(frozen=True, eq=False, slots=True)
class Global:
    """The name of a class or function in a file, not imported; ``make`` is called instead."""

    kind: str
    """The qualified name, such as ``torch.nn.functional.relu``."""
    make: Callable[..., object] | None = None


@dataclass(eq=False, repr=False, slots=True)
class Instance:
    """The stored state of an object of a class of the old code, without the class.

    Its values come from a file that can be hostile: they can be deeply nested, shared many times
    and contain themselves. Do not print, compare or copy them before their types are checked.
    """

    kind: str
    """Module and name of its class, such as ``mem_transformer.MemTransformerLM``."""
    args: tuple = ()
    """Arguments of its constructor."""
    state: object = None
    """Its attributes, usually a dictionary; None if there are none."""

    def extend(self, elements: list) -> None:
        """Drop elements; called by the unpickler as for lists."""

    append = extend


def attributes(content: object) -> dict[Any, Any]:
    """Return the attributes of an instance, or a dictionary itself; else an empty one."""
    state = content.state if isinstance(content, Instance) else content
    return state if isinstance(state, dict) else {}


def _refuse_reference(reference: object) -> object:
    raise UnreadableFile("the pickle refers to something outside of itself")


def load_pickle(
    file: BytesIO | mmap.mmap, persistent_load: Callable[[object], object] = _refuse_reference
) -> Any:
    """Read the pickle at the position of a file without executing anything.

    ``persistent_load`` returns the object for a reference to something outside of the pickle.
    """
    try:
        return _SafeUnpickler(file, persistent_load).load()
    except (UnreadableFile, MemoryError):
        raise
    except Exception as error:
        raise UnreadableFile(
            f"the pickle is damaged at byte {file.tell():,} ({type(error).__name__}: "
            f"{printable(str(error))}): get a fresh copy of the file"
        ) from error


# Approximate bytes of an entry of a dictionary or of a set.
_ENTRY = 80
# Approximate bytes of an element of a value that is copied; dictionaries are not copied.
_ELEMENTS = {str: 1, bytes: 1, bytearray: 1, list: 16, tuple: 16, set: 16, frozenset: 16}
# Approximate bytes allocated by each opcode: by default a reference on the stack, and one in the
# container of the value.
_SIZES = [16] * 256
for _codes, _size in (
    (b"ILFJM\x8a\x8bG", 48),
    (b"STUVX\x8c\x8dCB\x8e\x96", 80),
    # Including the bytes that the check of the depth takes for each container.
    (b"(t\x85\x86\x87]l}d", 200),
    (b"\x8f\x91", 260),
    (b"pqr\x94", 100),
    (b"c\x93", 500),
    (b"ioR\x81\x92Q", 800),
    (b"\x80\x95ae01sub\x90.", 0),
):
    for _code in _codes:
        _SIZES[_code] = _size

_Python: Any = pickle._Unpickler  # pyright: ignore[reportAttributeAccessIssue]


def _bounded(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Limit the size of integers, so that arithmetic on them is fast."""

    def load_number(self: Any) -> None:
        load(self)
        if self.stack[-1].bit_length() > _MAX_BITS:
            raise UnreadableFile(f"the pickle has a number of more than {_MAX_BITS:,} bits")

    return load_number


class _SafeUnpickler(_Python):
    """Python's unpickler, with closed tables in place of imports and calls."""

    def __init__(
        self, file: BytesIO | mmap.mmap, persistent_load: Callable[[object], object]
    ) -> None:
        super().__init__(file)
        self._file = file
        self._start = file.tell()
        file.seek(0, os.SEEK_END)
        self._size = file.tell()
        file.seek(self._start)
        self.persistent_load = persistent_load
        self._names: dict[tuple[str, str], object] = {}
        self._memory = self._allowed = 0

    def load(self) -> object:
        # Frames are ignored: the whole file is mapped already.
        self.read, self.readline = self._file_read, self._file_readline
        self.metastack, self.stack = [], []
        self.append = self.stack.append
        read, dispatch, sizes = self.read, self.dispatch, _SIZES
        while code := read(1):
            key = code[0]
            self._memory += sizes[key]
            if self._memory > self._allowed:
                self._check_memory()
            if code == pickle.STOP:
                break
            dispatch[key](self)
        if not code:
            raise UnreadableFile("the pickle is truncated: the file was not copied completely")
        (value,) = self.stack
        if type(value) in _CONTAINERS:
            _depth(value, 1, {})
        return value

    def _check_memory(self) -> None:
        n_read = self._file.tell() - self._start
        self._allowed = (64 << 20) + 20 * n_read
        if self._memory > self._allowed:
            raise UnreadableFile(
                f"refused: the first {n_read:,} bytes of the pickle would take more than "
                f"{self._allowed >> 20:,} MB of memory, which no checkpoint needs"
            )

    # Plain values.

    load_int, load_long = _bounded(_Python.load_int), _bounded(_Python.load_long)
    load_long1, load_long4 = _bounded(_Python.load_long1), _bounded(_Python.load_long4)

    def load_frame(self) -> None:
        if int.from_bytes(self.read(8), "little") > self._size - self._file.tell():
            raise UnreadableFile("the pickle is truncated: a frame does not fit in")

    def _decode_string(self, value: bytes) -> bytes | str:
        return value if len(value) >= _LONG_TEXT else value.decode("latin-1")

    def load_bytearray8(self) -> None:
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))

    # Containers.

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set_items(items)

    def load_setitem(self) -> None:
        self._set_items([self.stack.pop(-2), self.stack.pop()])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, items: list) -> None:
        keys, target = self._hashable(items[::2]), self.stack[-1]
        if type(target) not in (dict, Instance) or len(items) % 2:
            raise UnreadableFile("the pickle sets entries of something that is not a dictionary")
        if type(target) is dict:
            target.update(zip(keys, items[1::2], strict=True))

    def load_frozenset(self) -> None:
        members = self.pop_mark()
        self.append(frozenset(self._hashable(members)))

    def load_additems(self) -> None:
        members = self._hashable(self.pop_mark())
        if type(self.stack[-1]) is not set:
            raise UnreadableFile("the pickle adds members to something that is not a set")
        self.stack[-1].update(members)

    def _hashable(self, keys: list) -> list:
        self._memory += _ENTRY * len(keys)
        return _checked_keys(keys)

    # Names and objects.

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in self._names:
            self._names[module, name] = _resolve(module, name)
        return self._names[module, name]

    def _call(self, function: object, args: object) -> object:
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise UnreadableFile(
                f"refused: the file calls {printable(function)}; nothing was executed"
            )
        if function.make is None:
            return Instance(function.kind, args)
        # A small part of the file could be copied over and over.
        copied: tuple[Any, ...] = (args, *args)
        self._memory += sum(_ELEMENTS[type(x)] * len(x) for x in copied if type(x) in _ELEMENTS)
        made = function.make(*args)
        if isinstance(made, set | frozenset):
            self._memory += _ENTRY * len(made)
        return made

    def _instantiate(self, klass: object, args: list) -> None:
        self.append(self._call(klass, tuple(args)))

    def load_reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], args)

    load_newobj = load_reduce

    def load_newobj_ex(self) -> None:
        if self.stack.pop():
            raise UnreadableFile("the pickle makes an object with named arguments")
        self.load_reduce()

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Instance):
            # Attributes in slots are stored separately.
            if type(state) is tuple and len(state) == 2 and type(state[1]) is dict:
                merged: dict = {**(state[0] or {}), **state[1]}
                self._memory += _ENTRY * len(merged)
                state = merged
            if target.kind != _ARRAY:
                target.state = state
        elif type(target) not in (dict, set) and not isinstance(target, Tensor):
            # Attributes of dictionaries and tensors are not needed.
            raise UnreadableFile("refused: the file changes something that is not its own object")


# Without the opcodes for registered extensions and out-of-band buffers.
_SafeUnpickler.dispatch = {
    code: getattr(_SafeUnpickler, load.__name__)
    for code, load in _Python.dispatch.items()
    if code not in b"\x82\x83\x84\x97\x98"
}

_CONTAINERS = {list, tuple, dict, Instance}


def _depth(container: Any, level: int, depths: dict[int, int]) -> int:
    """Return how deeply containers are nested in one; require that recursion can follow them.

    ``level`` is the number of containers around it, ``depths`` has those that were seen.
    """
    # Zero while it is being measured, which also ends cycles.
    deepest = depths[id(container)] = 0
    inside = container.values() if isinstance(container, dict) else container
    if isinstance(container, Instance):
        inside = container.args, container.state
    for x in inside:
        if type(x) in _CONTAINERS and x and deepest + level <= _MAX_DEPTH:
            known = depths.get(id(x))
            deepest = max(deepest, _depth(x, level + 1, depths) if known is None else known)
    if max(deepest, level) >= _MAX_DEPTH:
        raise UnreadableFile(f"refused: values are nested more than {_MAX_DEPTH} deep")
    depths[id(container)] = deepest + 1
    return deepest + 1


_KEYS = {str, bytes, int, float, bool, type(None), Global, torch.dtype}


def _checked_keys(keys: list) -> list:
    """Check that keys of a dictionary, or members of a set, are fast to hash.

    Nested and long tuples take long to hash, or crash Python; large integers, and tuples of
    integers, can be chosen so that all have the same hash.
    """
    if set(map(type, keys)) <= {str}:
        return keys
    for key in keys:
        if type(key) is tuple:
            is_fast = len(key) <= 8 and set(map(type, key)) <= {str, bytes}
        else:
            is_fast = type(key) in _KEYS and (type(key) is not int or abs(key) < 2**60)
        if not is_fast:
            raise UnreadableFile(
                f"a dictionary has {printable(key)} for a key, not a text, a number of ordinary "
                "size or a tuple of few words"
            )
    return keys


# Modules of the authors, of NVIDIA and of Hugging Face, which forks have in other packages.
_OLD_MODULES = {
    *("mem_transformer", "proj_adaptive_softmax", "adaptive_softmax", "log_uniform_sampler"),
    *("data_utils", "vocabulary", "data_parallel", "exp_utils", "lamb"),
    *("modeling_transfo_xl", "modeling_transfo_xl_utilities", "tokenization_transfo_xl"),
    "configuration_transfo_xl",
}
_OLD_CLASSES = {
    *("MemTransformerLM", "AdaptiveEmbedding", "PositionalEmbedding", "PositionwiseFF"),
    *("MultiHeadAttn", "RelMultiHeadAttn", "RelPartialLearnableMultiHeadAttn"),
    *("RelLearnableMultiHeadAttn", "DecoderLayer", "RelLearnableDecoderLayer"),
    *("RelPartialLearnableDecoderLayer", "ProjectedAdaptiveLogSoftmax", "LogUniformSampler"),
    *("Corpus", "LMOrderedIterator", "LMShuffledIterator", "LMMultiFileIterator", "Vocab"),
}
_PACKAGES = (
    *("torch.nn.modules", "torch.nn.backends", "torch.nn.parallel", "torch.optim", "apex"),
    *("torch.nn.functional", "torch.cuda.amp", "transformers", "pytorch_transformers"),
    *("pytorch_pretrained_bert", "tokenizers", "sacremoses", "regex", "_regex", "collections"),
)
_INERT = {
    *("argparse.Namespace", "types.SimpleNamespace", "re._compile", "torch.Tensor"),
    *("pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.Path", "pathlib._local.PosixPath"),
    *("builtins.object", "numpy.dtype", "torch.device"),
}
# Python 2 and NumPy 1 have other names for some modules.
_RENAMED = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
}


def _resolve(module: str, name: str) -> Global | torch.dtype:
    """Look up a name in the tables."""
    module = _RENAMED.get(module, module)
    kind = f"{module}.{name}"
    if module in ("torch", "torch.cuda", "torch.storage") and name in DTYPES:
        return DTYPES[name]
    if len(kind) <= _MAX_NAME and (
        kind in _CONSTRUCTORS
        or kind in _INERT
        or module.rpartition(".")[2] in _OLD_MODULES
        or (module == "__main__" and name in _OLD_CLASSES)
        or f"{module}.".startswith(tuple(f"{package}." for package in _PACKAGES))
    ):
        return Global(kind, _CONSTRUCTORS.get(kind))
    raise UnreadableFile(
        f"refused: the file names {printable(kind)}, which no Transformer-XL checkpoint needs; "
        "nothing was executed"
    )


# Replacements of the functions that a file can call.


def _new_instance(cls: object, *args: object) -> object:
    if not isinstance(cls, Global) or cls.kind.startswith("copyreg."):
        raise UnreadableFile("refused: an object is created from something other than a class")
    return cls.make(*args) if cls.make else Instance(cls.kind, args)


def _reconstructor(cls: object, base: object, state: object) -> Instance:
    made = _new_instance(cls)
    if not isinstance(made, Instance):
        raise UnreadableFile("an object is made of a class that is not supported")
    return made


def _dict(items: object = ()) -> dict:
    if type(items) is dict:
        return items
    pairs = _list(items)
    if any(type(pair) not in (list, tuple) or len(pair) != 2 for pair in pairs):
        raise UnreadableFile("a dictionary is created from something other than pairs")
    _checked_keys([key for key, _ in pairs])
    return dict(pairs)


def _list(items: object = ()) -> list:
    if type(items) not in (list, tuple, set, frozenset):
        raise UnreadableFile("a list is created from something other than a list")
    return list(items)  # pyright: ignore[reportArgumentType]


def _set(items: object = ()) -> set:
    return set(_checked_keys(_list(items)))


def _plain(kind: Callable[[], object]) -> Callable[..., object]:
    def make(value: object = kind()) -> object:
        if type(value) is not kind:
            raise UnreadableFile(f"a {kind.__name__} is made of {printable(value)}")
        return value

    return make


def _encode(text: object, encoding: object) -> bytes:
    """Decode bytes from the string as which Python 3 pickles them for Python 2."""
    if type(text) is not str or encoding not in ("latin1", "latin-1", "utf-8", "utf8"):
        raise UnreadableFile("a text is encoded in a way that is not supported")
    return text.encode(encoding)


def _bytearray(content: object = b"", encoding: object = None) -> bytearray:
    if encoding is not None:
        content = _encode(content, encoding)
    if not isinstance(content, bytes | bytearray):
        raise UnreadableFile("bytes are created from something other than bytes")
    return bytearray(content)


_ARRAY = "numpy.ndarray"
_NUMBERS = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}


def _array(*_: object) -> Instance:
    return Instance(_ARRAY)


def _number(dtype: object, data: object) -> object:
    """Return a number of NumPy as one of Python."""
    match dtype:
        case Instance(kind="numpy.dtype", args=(code, *_), state=(_, order, *_)):
            if type(code) is type(order) is str and code in _NUMBERS and order in "<|=>":
                content = data.encode("latin-1") if isinstance(data, str) else data
                return np.frombuffer(content, np.dtype(order + code), 1).item()  # pyright: ignore
    raise UnreadableFile("a number of NumPy is of an unknown type")


def _tensor(
    storage: object, offset: object, size: object, stride: object, *others: object
) -> Tensor:
    if not isinstance(storage, Storage):
        raise UnreadableFile("a tensor has no storage")
    # Only the newest of three formats has the type of its numbers.
    dtype = next((x for x in others if isinstance(x, torch.dtype)), storage.dtype)
    return storage.tensor(offset, size, stride, dtype)


def _tensor_of_type(function: object, cls: object, args: tuple, state: object) -> object:
    if not isinstance(function, Global) or function.make is not _tensor:
        raise UnreadableFile("a tensor is made in a way that is not supported")
    return _tensor(*args)


def _parameter(data: object, *_: object) -> Tensor:
    if not isinstance(data, Tensor):
        raise UnreadableFile("a parameter has no tensor")
    return data


def _nested_file(*_: object) -> object:
    raise UnreadableFile(
        "refused: tensors were pickled without torch.save, which nests one file in another; load "
        "the file with the program that wrote it and save it with torch.save"
    )


_CONSTRUCTORS: dict[str, Callable[..., object]] = {
    **dict.fromkeys(("collections.OrderedDict", "collections.Counter", "builtins.dict"), _dict),
    "collections.defaultdict": lambda factory=None, items=(): _dict(items),
    "builtins.list": _list,
    "builtins.tuple": lambda items=(): tuple(_list(items)),
    "builtins.set": _set,
    "builtins.frozenset": lambda items=(): frozenset(_set(items)),
    **{f"builtins.{kind.__name__}": _plain(kind) for kind in (bool, int, float, str, bytes)},
    "builtins.unicode": _plain(str),
    "builtins.long": _plain(int),
    "builtins.complex": complex,
    "builtins.bytearray": _bytearray,
    "_codecs.encode": _encode,
    "copyreg._reconstructor": _reconstructor,
    "copyreg.__newobj__": _new_instance,
    _ARRAY: _array,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy._core.numeric._frombuffer": _array,
    "numpy._core.multiarray.scalar": _number,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _tensor_of_type,
    "torch.nn.parameter.Parameter": _parameter,
    "torch.nn.parameter.Buffer": _parameter,
    "torch.Size": lambda items=(): tuple(_list(items)),
    "torch.storage._load_from_bytes": _nested_file,
}
