"""The names that old files may hold, and what is made when a file calls them.

A file can only reach functions of this module and of
:mod:`~transformer_xl.interop.convert.arrays`; they make containers, arrays and tensors. Classes of
the old code become :class:`~transformer_xl.interop.convert.inert.Instance`. Any other name is
refused.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from transformer_xl.interop.convert.arrays import (
    COST,
    Make,
    Spend,
    encode,
    make_dtype,
    make_frombuffer,
    make_reconstruct,
    make_scalar,
)
from transformer_xl.interop.convert.inert import Global, Instance, UnreadableFile, printable
from transformer_xl.interop.convert.storages import DTYPES, STORAGE_DTYPES, Storage


class Constructor(Global):
    """A name with a function of ours behind it."""

    __slots__ = ("make",)

    def __init__(self, module: str, name: str, make: Make) -> None:
        super().__init__(module, name)
        self.make = make


# Modules of the authors, of NVIDIA and of Hugging Face; forks moved them into packages.
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
}
# Python 2 and NumPy 1 had other names for some modules.
_RENAMED = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
}


def resolve(module: str, name: str) -> Global | torch.dtype:
    """Return what stands for a name in a file.

    Raises:
        UnreadableFile: Files of the old implementations do not need the name.
    """
    module = _RENAMED.get(module, module)
    kind = f"{module}.{name}"
    if make := _CONSTRUCTORS.get(kind):
        return Constructor(module, name, make)
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    if module in ("torch", "torch.cuda", "torch.storage") and name in STORAGE_DTYPES:
        return Global(module, name)
    if (
        kind in _INERT
        or module.rpartition(".")[2] in _OLD_MODULES
        or (module == "__main__" and name in _OLD_CLASSES)
        or module.startswith(tuple(f"{package}." for package in _PACKAGES))
        or module in _PACKAGES
    ):
        return Global(module, name)
    raise UnreadableFile(
        f"refused: the file names {printable(kind)}, which no Transformer-XL checkpoint needs; "
        "nothing was executed"
    )


def call(function: object, args: object, spend: Spend) -> object:
    """Make what a file wants to have made by calling ``function``.

    Raises:
        UnreadableFile: It is no name, or the arguments are not those it takes.
    """
    if not isinstance(function, Global) or not isinstance(args, tuple):
        raise UnreadableFile(f"refused: the file calls {printable(function)}; nothing was executed")
    if isinstance(function, Constructor):
        return function.make(args, spend)
    return Instance(function.kind, args)


_PLAIN_KEYS = {str, bytes, float, bool, type(None), Global, Constructor, torch.dtype}


def check_keys(keys: Iterable[object]) -> None:
    """Check that keys of a dictionary, or members of a set, take no time worth mentioning.

    Nested and long tuples take long to hash, or crash Python; whole numbers of any size, and
    tuples of them, can be chosen so that all have the same hash.

    Raises:
        UnreadableFile: They may not be keys.
    """
    keys = list(keys)
    kinds = set(map(type, keys)) - _PLAIN_KEYS
    if int in kinds:
        if any(type(key) is int and not -(2**60) < key < 2**60 for key in keys):
            raise UnreadableFile("a dictionary has a number of absurd size for a key")
        kinds.remove(int)
    if tuple in kinds:
        for key in keys:
            if type(key) is tuple and (len(key) > 8 or set(map(type, key)) - {str, bytes}):
                raise UnreadableFile("a dictionary has a tuple for a key that is not of few words")
        kinds.remove(tuple)
    if kinds:
        raise UnreadableFile(f"a dictionary has {printable(keys[0])} for a key")


def elements_of(target: object) -> list:
    """Return a list, or the elements of an object that is a kind of one.

    Raises:
        UnreadableFile: It is something else.
    """
    if isinstance(target, Instance):
        return target.elements
    if type(target) is not list:
        raise UnreadableFile("the pickle appends to something that is no list")
    return target


def set_items(target: object, items: list) -> None:
    """Set entries of a dictionary, or of an object that is a kind of one.

    Args:
        target: Where to set them.
        items: Keys and values in turns.

    Raises:
        UnreadableFile: It is something else, or a key may not be one.
    """
    entries = target.entries if isinstance(target, Instance) else target
    if type(entries) is not dict or len(items) % 2:
        raise UnreadableFile("the pickle sets entries of something that is no dictionary")
    check_keys(items[::2])
    entries.update(zip(items[::2], items[1::2], strict=True))


def merged(state: object, spend: Spend) -> object:
    """Return the attributes of an object in one piece; those of slots lie apart in a file."""
    if type(state) is tuple and len(state) == 2 and type(state[1]) is dict:
        own, slots = state
        if not own:
            return slots
        if type(own) is dict:
            spend(len(own) + len(slots))
            return {**own, **slots}
    return state


def _dict(args: tuple, spend: Spend) -> dict:
    if not args:
        return {}
    (items,) = args
    if type(items) is dict:
        return items
    if type(items) is not list:
        raise UnreadableFile("a dictionary is made of something else than pairs")
    spend(len(items))
    if any(type(pair) not in (list, tuple) or len(pair) != 2 for pair in items):
        raise UnreadableFile("a dictionary is made of something else than pairs")
    check_keys(key for key, _ in items)
    return dict(items)


def _defaultdict(args: tuple, spend: Spend) -> dict:
    return _dict(args[1:], spend)


def _set(args: tuple, spend: Spend) -> set:
    members = _list(args, spend)
    check_keys(members)
    return set(members)


def _frozenset(args: tuple, spend: Spend) -> frozenset:
    return frozenset(_set(args, spend))


def _list(args: tuple, spend: Spend) -> list:
    if not args:
        return []
    (items,) = args
    if type(items) not in (list, tuple, set, frozenset):
        raise UnreadableFile("a list is made of something else than a list")
    spend(len(items))
    return list(items)


def _tuple(args: tuple, spend: Spend) -> tuple:
    return tuple(_list(args, spend))


def _plain(kind: type) -> Make:
    def make(args: tuple, spend: Spend) -> object:
        if not args:
            return kind()
        (value,) = args
        if type(value) is not kind:
            raise UnreadableFile(f"a {kind.__name__} is made of {printable(value)}")
        return value

    return make


def _complex(args: tuple, spend: Spend) -> complex:
    real, imaginary = args
    if type(real) is not float or type(imaginary) is not float:
        raise UnreadableFile("a complex number is made of something else than two numbers")
    return complex(real, imaginary)


def _bytearray(args: tuple, spend: Spend) -> bytearray:
    if not args:
        return bytearray()
    content = encode(args, spend) if len(args) == 2 else args[0]
    if type(content) not in (bytes, bytearray):
        raise UnreadableFile("bytes are made of something else than bytes")
    spend(len(content))
    return bytearray(content)


def _object(args: tuple, spend: Spend) -> Instance:
    return Instance("builtins.object")


def _reconstructor(args: tuple, spend: Spend) -> object:
    cls, base, state = args
    made = _newobj((cls,), spend)
    kind = base.kind if isinstance(base, Global) else None
    if isinstance(made, Instance) and kind == "builtins.dict" and type(state) is dict:
        made.entries = state
    elif isinstance(made, Instance) and kind == "builtins.list" and type(state) is list:
        made.elements = state
    elif kind != "builtins.object":
        raise UnreadableFile("an object is made of a class that is not supported")
    return made


def _newobj(args: tuple, spend: Spend) -> object:
    cls, *args_of_class = args
    if isinstance(cls, Global) and cls.module == "copyreg":
        raise UnreadableFile("an object is made of a function")
    return call(cls, tuple(args_of_class), spend)


def _tensor(args: tuple, spend: Spend) -> Tensor:
    spend(COST)
    storage, *layout = args[:4]
    if not isinstance(storage, Storage) or len(layout) != 3:
        raise UnreadableFile("a tensor has no storage")
    return storage.tensor(*layout)


def _tensor_v3(args: tuple, spend: Spend) -> Tensor:
    spend(COST)
    storage, offset, size, stride, _, _, dtype, *_ = args
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise UnreadableFile("a tensor has no storage, or no type")
    return storage.tensor(offset, size, stride, dtype)


def _tensor_of_type(args: tuple, spend: Spend) -> Tensor:
    function, _, args_of_function, _ = args
    if not isinstance(function, Constructor) or function.make not in (_tensor, _tensor_v3):
        raise UnreadableFile("a tensor is made in a way that is not supported")
    return function.make(args_of_function, spend)  # pyright: ignore[reportReturnType]


def _parameter(args: tuple, spend: Spend) -> Tensor:
    if not args or not isinstance(args[0], Tensor):
        raise UnreadableFile("a parameter has no tensor")
    return args[0]


def _device(args: tuple, spend: Spend) -> str:
    if not 1 <= len(args) <= 2 or any(type(part) not in (str, int) for part in args):
        raise UnreadableFile("a device has no name")
    return ":".join(str(part) for part in args)


def _load_from_bytes(args: tuple, spend: Spend) -> object:
    raise UnreadableFile(
        "refused: tensors were pickled without torch.save, which nests one file in another; load "
        "the file with the program that wrote it and save it with torch.save"
    )


_CONSTRUCTORS: dict[str, Make] = {
    "collections.OrderedDict": _dict,
    "collections.Counter": _dict,
    "collections.defaultdict": _defaultdict,
    "builtins.dict": _dict,
    "builtins.list": _list,
    "builtins.tuple": _tuple,
    "builtins.set": _set,
    "builtins.frozenset": _frozenset,
    **{f"builtins.{kind.__name__}": _plain(kind) for kind in (bool, int, float, str, bytes)},
    "builtins.unicode": _plain(str),
    "builtins.long": _plain(int),
    "builtins.complex": _complex,
    "builtins.bytearray": _bytearray,
    "builtins.object": _object,
    "_codecs.encode": encode,
    "copyreg._reconstructor": _reconstructor,
    "copyreg.__newobj__": _newobj,
    "numpy.ndarray": make_reconstruct,
    "numpy.dtype": make_dtype,
    "numpy._core.multiarray._reconstruct": make_reconstruct,
    "numpy._core.multiarray.scalar": make_scalar,
    "numpy._core.numeric._frombuffer": make_frombuffer,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _tensor_of_type,
    "torch.nn.parameter.Parameter": _parameter,
    "torch.nn.parameter.Buffer": _parameter,
    "torch.Size": _tuple,
    "torch.device": _device,
    "torch.storage._load_from_bytes": _load_from_bytes,
}
