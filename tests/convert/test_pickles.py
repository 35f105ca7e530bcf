"""Pickles: what the real ``pickle`` reads, and nothing that is executed."""

import argparse
import collections
import pickle
import re
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transformer_xl.errors import CheckpointError
from transformer_xl.interop.convert.torch_files import Instance, read_pickled

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
Read = Callable[[bytes], Any]


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Read a pickle; what a child process might have executed would be seen in its folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.pkl"

    def read_bytes(data):
        path.write_bytes(data)
        try:
            return read_pickled(path)
        finally:
            assert list(tmp_path.iterdir()) == [path]

    return read_bytes


def short(text):
    return b"\x8c" + bytes([len(text)]) + text.encode()


def named(module, name):
    return short(module) + short(name) + b"\x93"


KEYS = st.one_of(
    *(st.text(st.characters(codec="utf-8")), st.binary(), st.integers(), st.booleans(), st.none()),
    *(st.floats(allow_nan=False), st.tuples(st.text(), st.text())),
)
VALUES = st.recursive(
    KEYS,
    lambda inside: st.one_of(
        st.lists(inside),
        st.lists(inside).map(tuple),
        st.dictionaries(KEYS, inside),
        st.dictionaries(KEYS, inside).map(collections.OrderedDict),
        st.sets(KEYS),
        st.frozensets(KEYS),
    ),
    max_leaves=20,
)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(VALUES, st.sampled_from(PROTOCOLS))
def test_plain_values_are_read_as_by_python(read, value, protocol):
    assert read(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_classes_become_plain_containers_and_records(read, protocol):
    containers = [
        collections.OrderedDict(b=1, a=[2]),
        collections.Counter("hello"),
        collections.defaultdict(list, {"x": [1]}),
        {"z", 1},
    ]
    arrays = [np.arange(12.0).reshape(3, 4), np.array(7, dtype=np.uint8)]
    numbers = [np.float64(0.1), np.int64(-3), np.bool_(True), np.dtype(">i4").type(7)]
    objects = [argparse.Namespace(n_layer=3, cutoffs=[1]), re.compile("a+")]
    got = read(pickle.dumps([containers, arrays, numbers, objects], protocol))
    assert got[0] == containers
    assert list(map(type, got[0])) == [dict, dict, dict, frozenset]
    assert list(got[0][0]) == ["b", "a"]
    # Without their numbers.
    assert [(x.kind, x.state) for x in got[1]] == [("numpy.ndarray", None)] * 2
    assert got[2] == [0.1, -3, True, 7]
    assert list(map(type, got[2])) == [float, int, bool, int]
    assert [x.kind for x in got[3]] == ["argparse.Namespace", "re._compile"]
    assert got[3][0].state == {"n_layer": 3, "cutoffs": [1]}


def test_texts_of_python_2_are_latin_1(read):
    assert read(b"\x80\x02U\x04caf\xe9.") == "café"
    assert read(b"S'caf\\xe9\\n\\'\\\\'\np0\n.") == "café\n'\\"
    # As pickle.dumps(numpy.int64(200), 2) of Python 2.
    number = (
        b"\x80\x02cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\nU\x02i8K\x00K\x01\x87R"
        b"(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tbU\x08"
    )
    assert read(number + struct.pack("<q", 200) + b"\x86R.") == 200


@pytest.mark.parametrize("module", ["mem_transformer", "my.fork.mem_transformer", "__main__"])
def test_classes_of_forks_and_of_scripts_are_known_by_their_last_name(read, module):
    found = read(b"\x80\x04" + named(module, "MemTransformerLM") + b")\x81}b.")
    assert isinstance(found, Instance)
    assert (found.kind, found.state) == (f"{module}.MemTransformerLM", {})


FORBIDDEN = [
    *(("os", "system"), ("posix", "system"), ("nt", "system"), ("subprocess", "Popen")),
    *(("builtins", "eval"), ("builtins", "exec"), ("builtins", "getattr")),
    *(("builtins", "__import__"), ("__builtin__", "apply"), ("__main__", "anything")),
    *(("operator", "attrgetter"), ("functools", "partial"), ("torch", "load")),
    *(("torch.hub", "load"), ("torch.storage", "_load_from_bytes"), ("numpy", "load")),
    *(("pickle", "loads"), ("runpy", "run_path"), ("collections_", "OrderedDict")),
]
HOW = ("reduce", "newobj", "inst", "obj", "global")


@pytest.mark.parametrize(
    ("module", "name", "how"),
    # Each name, and each way of calling one.
    [(*names, HOW[i % len(HOW)]) for i, names in enumerate(FORBIDDEN)]
    + [("posix", "system", how) for how in HOW],
)
def test_what_no_checkpoint_needs_is_refused(read, module, name, how):
    touch = short("touch marker")
    data = {
        "reduce": named(module, name) + touch + b"\x85R.",
        "newobj": named(module, name) + touch + b"\x85\x81.",
        "inst": b"(" + touch + f"i{module}\n{name}\n.".encode(),
        "obj": b"(" + named(module, name) + touch + b"o.",
        "global": f"c{module}\n{name}\n".encode() + touch + b"\x85R.",
    }[how]
    refused = f"the file names .*{name}, which no Transformer-XL checkpoint needs; nothing was exec"
    if name == "_load_from_bytes":
        refused = "without torch.save|damaged"
    with pytest.raises(CheckpointError, match=refused):
        read(data)


N = 100_000
HOSTILE = {
    "attributes of a function": named("torch._utils", "_rebuild_parameter")
    + b"}"
    + short("__call__")
    + b"K\x01sb.",
    "attributes of a class": named("collections", "OrderedDict") + b"}" + short("a") + b"K\x01sb.",
    "attributes of a text": short("text") + b"}" + short("a") + b"K\x01sb.",
    "called text": short("text") + b")R.",
    "called list": b"])R.",
    "called object": named("mem_transformer", "X") + b")R)R.",
    "deep tuples": b")" + b"\x85" * N + b".",
    "deep marked tuples": b"(" * N + b"t" * N + b".",
    "deep lists": b"]" * N + b"a" * (N - 1) + b".",
    "deep dictionaries": b"}" + b"K\x00}" * N + b"s" * N + b".",
    "deep objects": named("a.vocabulary", "V") + b"\x94)R" + b"h\x00)R" * N + b"b" * N + b".",
    "list in itself": b"\x80\x04]\x94h\x00a.",
    "tuples as a key": b"})" + b"\x85" * N + b"K\x00s.",
    "tuples in a set": b"\x8f()" + b"\x85" * N + b"\x90.",
    "shared tuples as a key": b"})" + b"2\x86" * 100 + b"K\x00s.",
    "new objects": (
        b"(" + named("copyreg", "__newobj__") + b"\x94" + b"h\x00" * N + b"t\x940h\x00h\x01R."
    ),
    # 10**100 elements if they are unfolded.
    "shared lists": b"\x80\x04]\x940"
    + b"".join(b"]\x94(" + bytes([ord("h"), i]) * 10 + b"e0" for i in range(100))
    + b"h\x64.",
    "shared text": b"X" + struct.pack("<I", N) + b"x" * N + b"\x94(" + b"h\x00" * N + b"l.",
    "copies": b"\x80\x04("
    + b"K\x01" * 200_000
    + b"l\x940]("
    + (named("builtins", "tuple") + b"h\x00\x85R") * 2000
    + b"e.",
    "memo index": b"\x80\x04Nr\x00\x00\x00\x80.",
    "no memo": b"\x80\x04j\x00\x00\x00\x80.",
    "bytes": b"\x8e" + struct.pack("<Q", 2**62) + b"x.",
    "bytearray": b"\x96" + struct.pack("<Q", 2**62) + b"x.",
    "text": b"\x8d" + struct.pack("<Q", 2**63) + b"x.",
    "signed length": b"T\xff\xff\xff\xffx.",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
    "digits": b"I" + b"9" * 1_000_000 + b"\n.",
    "long bytes": b"\x8b" + struct.pack("<I", 10**6) + b"x" * 10**6 + b".",
    "long size": b"\x8b\xff\xff\xff\xff.",
    "not utf-8": b"\x8c\x01\xff.",
    "not utf-8 name": b"c\xff\n\xff\n.",
    "list as a key": b"}]K\x00s.",
    "odd entries": b"}(K\x00u.",
    "empty stack": b".",
    "no mark": b"t.",
    "protocol": b"\x80\x06N.",
    "no instruction": b"\xffN.",
    "no end": b"N",
    "extension": b"\x82\x01.",
    "buffer": b"\x97.",
    "elsewhere": b"NQ.",
    "elsewhere too": b"Pname\n.",
    "named arguments": named("a.vocabulary", "V") + b")}" + short("x") + b"Ns\x92.",
    "named module": b"K\x01K\x02\x93.",
    "large bytes": named("builtins", "bytes") + b"J\xff\xff\xff\x7f\x85R.",
    "large bytearray": named("builtins", "bytearray") + b"J\xff\xff\xff\x7f\x85R.",
    "data after it": b"N.more",
}
HOSTILE |= {
    f"number of {code}": b"\x80\x04"
    + named("numpy._core.multiarray", "scalar")
    + named("numpy", "dtype")
    + short(code)
    + b"\x89\x88\x87R(K\x03"
    + short("<")
    + b"NNNtbC"
    + bytes([size])
    + b"x" * size
    + b"\x86R."
    for code, size in (("f4", 3), ("O", 8), ("S8", 8))
}
# Keys of the same hash, with which dictionaries take for ever.
SLOW = b"\x80\x04}(" + b"".join(
    b"\x8a\x10" + (i * (2**61 - 1)).to_bytes(16, "little") + b"N" for i in range(150_000)
)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_and_damaged_pickles_are_refused(read, name):
    with pytest.raises(CheckpointError, match=r"x\.pkl"):
        read(HOSTILE[name])


@pytest.mark.slow
def test_a_pickle_that_takes_for_ever_is_refused(read):
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"takes more than \d+ s"):
        read(SLOW + b"u.")
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_every_beginning_of_a_pickle_is_refused(read, protocol):
    value = {"words": ["a", "b"], "array": np.arange(3), "settings": argparse.Namespace(x=1)}
    data = pickle.dumps(value, protocol)
    for n in range(1, len(data), 11):
        with pytest.raises(CheckpointError):
            read(data[:n])
