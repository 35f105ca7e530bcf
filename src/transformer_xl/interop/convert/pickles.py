"""Read pickles without executing anything, and within a bound on memory.

Python's own unpickler, with other handlers for classes, calls and attributes: a name is looked up
in the tables of this file, whose functions create containers, arrays and tensors; nothing is
imported. The objects of a pickle take at most about 64 MB plus 20 times the bytes read so far,
besides the contents of its strings; a vocabulary of the authors takes half of that. A file that
would take more is refused.
"""

import math
import mmap
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_xl.interop.convert.mapped_files import (
    DTYPES,
    STORAGE_DTYPES,
    Storage,
    UnreadableFile,
    checked_size,
    printable,
)

_MAX_BITS = 4096
_MAX_DEPTH = 200
_MAX_ARGS = 8
_MAX_NAME = 1000
# A Python 2 text of this size is the content of an array.
_LONG_TEXT = 1 << 20


@dataclass(frozen=True, eq=False, slots=True)
class Global:
    """The name of a class or function in a file, not imported; ``make`` is called instead."""

    module: str
    name: str
    make: Callable[..., object] | None = None

    @property
    def kind(self) -> str:
        """The qualified name, such as ``torch.nn.functional.relu``."""
        return f"{self.module}.{self.name}"


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
    entries: dict = field(default_factory=dict)
    """Its entries, if its class is a kind of dictionary."""
    elements: list = field(default_factory=list)
    """Its elements, if its class is a kind of list."""

    def append(self, element: object) -> None:
        """Append an element; called by the unpickler as for lists."""
        self.elements.append(element)

    def extend(self, elements: list) -> None:
        """Append elements; called by the unpickler as for lists."""
        self.elements.extend(elements)


def attributes(content: object) -> dict[Any, Any]:
    """Return the attributes of an instance, or a dictionary itself; else an empty one."""
    state = content.state if isinstance(content, Instance) else content
    return state if isinstance(state, dict) else {}


def _refuse_reference(reference: object) -> object:
    raise UnreadableFile("the pickle refers to something outside of itself")


def load_pickle(
    data: bytes | mmap.mmap,
    persistent_load: Callable[[object], object] = _refuse_reference,
    start: int = 0,
    end: int | None = None,
) -> tuple[object, int]:
    """Read the pickle between two positions without executing anything; return it and its end.

    ``persistent_load`` returns the object for a reference to something outside of the pickle.
    """
    file = BytesIO(data) if isinstance(data, bytes) else data
    file.seek(start)
    reader = _SafeUnpickler(file, persistent_load, len(data) if end is None else end)
    try:
        return reader.load(), file.tell()
    except (UnreadableFile, MemoryError):
        raise
    except Exception as error:
        raise UnreadableFile(
            f"the pickle is damaged at byte {file.tell():,} ({type(error).__name__}: "
            f"{printable(str(error))}): get a fresh copy of the file"
        ) from error


def _bounded(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Limit the size of integers, so that arithmetic on them is fast."""

    def load_number(self: Any) -> None:
        load(self)
        if self.stack[-1].bit_length() > _MAX_BITS:
            raise UnreadableFile(f"the pickle has a number of more than {_MAX_BITS:,} bits")

    return load_number


_Python: Any = pickle._Unpickler  # pyright: ignore[reportAttributeAccessIssue]


class _SafeUnpickler(_Python):
    """Python's unpickler, with closed tables in place of imports and calls."""

    def __init__(
        self, file: BytesIO | mmap.mmap, persistent_load: Callable[[object], object], end: int
    ) -> None:
        super().__init__(file)
        self._file = file
        self._start = file.tell()
        self._end = end
        self.persistent_load = persistent_load
        self._names: dict[tuple[str, str], object] = {}
        self._memory = 0
        self._allowed = 0
        # The budget for copies of values, in proportion to the size of the file.
        self._budget = 2 * (end - self._start) + 1000

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
        if not code or self._file.tell() > self._end:
            raise UnreadableFile("the pickle is truncated: the file was not copied completely")
        (value,) = self.stack
        _check_depth(value)
        return value

    def _check_memory(self) -> None:
        n_read = self._file.tell() - self._start
        self._allowed = (64 << 20) + 20 * n_read
        if self._memory > self._allowed:
            raise UnreadableFile(
                f"refused: the first {n_read:,} bytes of the pickle would take more than "
                f"{self._allowed >> 20:,} MB of memory, which no checkpoint needs"
            )

    def _charge(self, values: Iterable[object], cost: int = 0) -> None:
        """Charge copies of values to the budget."""
        self._budget -= cost + sum(len(x) for x in values if type(x) in _SIZED)  # pyright: ignore[reportArgumentType]
        if self._budget < 0:
            raise UnreadableFile("refused: a small part of the file is copied over and over")

    # Plain values.

    load_int, load_long = _bounded(_Python.load_int), _bounded(_Python.load_long)
    load_long1, load_long4 = _bounded(_Python.load_long1), _bounded(_Python.load_long4)

    def load_frame(self) -> None:
        if int.from_bytes(self.read(8), "little") > self._end - self._file.tell():
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
        items = self.stack[-2:]
        del self.stack[-2:]
        self._set_items(items)

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, items: list) -> None:
        target = self.stack[-1]
        entries = target.entries if isinstance(target, Instance) else target
        if type(entries) is not dict or len(items) % 2:
            raise UnreadableFile("the pickle sets entries of something that is not a dictionary")
        self._memory += _ENTRY * (len(items) // 2)
        _check_keys(items[::2])
        entries.update(zip(items[::2], items[1::2], strict=True))

    def _pop_members(self) -> list:
        members = self.pop_mark()
        self._memory += _ENTRY * len(members)
        _check_keys(members)
        return members

    def load_frozenset(self) -> None:
        members = self._pop_members()
        self.append(frozenset(members))

    def load_additems(self) -> None:
        members = self._pop_members()
        if type(self.stack[-1]) is not set:
            raise UnreadableFile("the pickle adds members to something that is not a set")
        self.stack[-1].update(members)

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
        if len(args) > _MAX_ARGS:
            raise UnreadableFile(f"{function.kind} is called with {len(args):,} arguments")
        self._charge(args, 40 * (function.make in _COSTLY))
        return function.make(*args)

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
                own, slots = state
                self._charge((own, slots))
                state = {**(own or {}), **slots}
            target.state = state
        elif isinstance(target, np.ndarray):
            self._charge(state if isinstance(state, tuple) else ())
            _fill_array(target, state)
        elif isinstance(target, np.dtype):
            if isinstance(state, tuple) and len(state) > 1 and state[1] not in ("<", "|", "="):
                raise UnreadableFile("an array was written by a big-endian machine")
        elif type(target) not in (dict, set) and not isinstance(target, Tensor):
            # Attributes of dictionaries and tensors are not needed.
            raise UnreadableFile("refused: the file changes something that is not its own object")


# Without the opcodes for registered extensions and out-of-band buffers.
_SafeUnpickler.dispatch = {
    code: getattr(_SafeUnpickler, load.__name__)
    for code, load in _Python.dispatch.items()
    if code not in b"\x82\x83\x84\x97\x98"
}

# Approximate bytes of an entry of a dictionary or of a set.
_ENTRY = 80
_SIZED = {str, bytes, bytearray, list, tuple, dict, set, frozenset}


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
    (b"ioR\x81\x92Q", 700),
    (b"\x80\x95ae01sub\x90.", 0),
):
    for _code in _codes:
        _SIZES[_code] = _size


def _check_depth(value: object) -> None:
    """Check that containers are not nested too deeply for recursion."""
    too_deep = UnreadableFile(f"refused: values are nested more than {_MAX_DEPTH} deep")
    # Depth of each container; 0 while it is being measured, which also ends cycles.
    depths: dict[int, int] = {}

    def measure(container: Any, level: int) -> int:
        if level > _MAX_DEPTH:
            raise too_deep
        deepest = depths[id(container)] = 0
        inside = container.values() if isinstance(container, dict) else container
        if isinstance(container, Instance):
            inside = container.args, container.state, container.entries, container.elements
        for x in inside:
            if type(x) in _CONTAINERS and x:
                known = depths.get(id(x))
                deepest = max(deepest, measure(x, level + 1) if known is None else known)
        if deepest >= _MAX_DEPTH:
            raise too_deep
        depths[id(container)] = deepest + 1
        return deepest + 1

    if type(value) in _CONTAINERS:
        measure(value, 1)


_CONTAINERS = {list, tuple, dict, Instance}

_PLAIN_KEYS = {str, bytes, float, bool, type(None), Global, torch.dtype}


def _check_keys(keys: list) -> None:
    """Check that keys of a dictionary, or members of a set, are fast to hash.

    Nested and long tuples take long to hash, or crash Python; large integers, and tuples of
    integers, can be chosen so that all have the same hash.
    """
    kinds = set(map(type, keys)) - _PLAIN_KEYS
    if int in kinds and any(type(key) is int and not -(2**60) < key < 2**60 for key in keys):
        raise UnreadableFile("a dictionary has a number of absurd size for a key")
    if tuple in kinds:
        for key in keys:
            if type(key) is tuple and (len(key) > 8 or set(map(type, key)) - {str, bytes}):
                raise UnreadableFile("a dictionary has a tuple for a key that is not of few words")
    if kinds - {int, tuple}:
        raise UnreadableFile(f"a dictionary has {printable(keys[0])} for a key")


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
    "builtins.object",
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
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    if len(kind) <= _MAX_NAME and (
        kind in _CONSTRUCTORS
        or kind in _INERT
        or (module in ("torch", "torch.cuda", "torch.storage") and name in STORAGE_DTYPES)
        or module.rpartition(".")[2] in _OLD_MODULES
        or (module == "__main__" and name in _OLD_CLASSES)
        or f"{module}.".startswith(tuple(f"{package}." for package in _PACKAGES))
    ):
        return Global(module, name, _CONSTRUCTORS.get(kind))
    raise UnreadableFile(
        f"refused: the file names {printable(kind)}, which no Transformer-XL checkpoint needs; "
        "nothing was executed"
    )


# Replacements of the functions that a file can call: they create containers, arrays and tensors.


def _new_instance(cls: object, *args: object) -> object:
    if not isinstance(cls, Global) or cls.module == "copyreg":
        raise UnreadableFile("refused: an object is created from something other than a class")
    return cls.make(*args) if cls.make else Instance(cls.kind, args)


def _reconstructor(cls: object, base: object, state: object) -> object:
    made = _new_instance(cls)
    kind = base.kind if isinstance(base, Global) else None
    if isinstance(made, Instance) and kind == "builtins.dict" and type(state) is dict:
        made.entries = state
    elif isinstance(made, Instance) and kind == "builtins.list" and type(state) is list:
        made.elements = state
    elif kind != "builtins.object":
        raise UnreadableFile("an object is made of a class that is not supported")
    return made


def _dict(items: object = ()) -> dict:
    if type(items) is dict:
        return items
    pairs = _list(items)
    if any(type(pair) not in (list, tuple) or len(pair) != 2 for pair in pairs):
        raise UnreadableFile("a dictionary is created from something other than pairs")
    _check_keys([key for key, _ in pairs])
    return dict(pairs)


def _list(items: object = ()) -> list:
    if type(items) not in (list, tuple, set, frozenset):
        raise UnreadableFile("a list is created from something other than a list")
    return list(items)  # pyright: ignore[reportArgumentType]


def _set(items: object = ()) -> set:
    members = _list(items)
    _check_keys(members)
    return set(members)


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


_NUMBERS = {"?", "b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}


def _dtype(code: object, *_: object) -> np.dtype:
    if not isinstance(code, str) or code.lstrip("<|=") not in _NUMBERS:
        raise UnreadableFile(f"an array holds {printable(code)} instead of numbers")
    return np.dtype(code.lstrip("<|="))


def _new_array(*_: object) -> np.ndarray:
    """Create an array whose shape, type and numbers are set later."""
    return np.empty(0, np.uint8)


def _fill_array(array: np.ndarray, state: object) -> None:
    """Set the shape, the type and the numbers of an array."""
    if not isinstance(state, tuple) or len(state) not in (4, 5):
        raise UnreadableFile("an array has a state of an unknown kind")
    shape, dtype, is_fortran, data = state[-4:]
    # Python 2 has one type for text and bytes.
    data = data.encode("latin-1") if type(data) is str else data
    if not isinstance(dtype, np.dtype) or not isinstance(data, bytes | bytearray):
        raise UnreadableFile("an array has no type, or no numbers")
    shape = checked_size(shape, len(data))
    if math.prod(shape) * dtype.itemsize != len(data):
        raise UnreadableFile(f"an array of another size has {len(data):,} bytes")
    # NumPy accepts a Python bool here, unlike its annotation.
    content = (1, shape, dtype, is_fortran == 1, bytes(data))
    array.__setstate__(content)  # pyright: ignore[reportArgumentType]


def _array_of_buffer(data: object, dtype: object, shape: object, order: object) -> np.ndarray:
    array = _new_array()
    _fill_array(array, (shape, dtype, order == "F", data))
    return array


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


def _device(*parts: object) -> str:
    if not 1 <= len(parts) <= 2 or any(type(part) not in (str, int) for part in parts):
        raise UnreadableFile("a device has no name")
    return ":".join(map(str, parts))


def _nested_file(*_: object) -> object:
    raise UnreadableFile(
        "refused: tensors were pickled without torch.save, which nests one file in another; load "
        "the file with the program that wrote it and save it with torch.save"
    )


# Objects that take more memory than their few bytes in a file.
_COSTLY = (_new_array, _tensor, _tensor_of_type)
_CONSTRUCTORS: dict[str, Callable[..., object]] = {
    "collections.OrderedDict": _dict,
    "collections.Counter": _dict,
    "collections.defaultdict": lambda factory=None, items=(): _dict(items),
    "builtins.dict": _dict,
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
    "numpy.ndarray": _new_array,
    "numpy.dtype": _dtype,
    "numpy._core.multiarray._reconstruct": _new_array,
    "numpy._core.multiarray.scalar": lambda dtype, data: _array_of_buffer(
        data, dtype, (1,), "C"
    ).item(),
    "numpy._core.numeric._frombuffer": _array_of_buffer,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _tensor_of_type,
    "torch.nn.parameter.Parameter": _parameter,
    "torch.nn.parameter.Buffer": _parameter,
    "torch.Size": lambda items=(): tuple(_list(items)),
    "torch.device": _device,
    "torch.storage._load_from_bytes": _nested_file,
}
