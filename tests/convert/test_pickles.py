"""Pickles: what the real ``pickle`` reads, and nothing that is executed."""

import argparse
import collections
import pickle
import re
import struct
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.interop.convert.pickles import Global, Instance, UnreadableFile, load_pickle

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def read(data: bytes) -> Any:
    file = BytesIO(data)
    value = load_pickle(file)
    assert file.tell() == len(data)
    return value


def is_refused(data: bytes) -> bool:
    try:
        read(data)
    except UnreadableFile:
        return True
    return False


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def named(module: str, name: str) -> bytes:
    return short(module) + short(name) + b"\x93"


KEYS = st.one_of(
    st.text(st.characters(codec="utf-8")),
    st.binary(),
    st.integers(-(2**50), 2**50),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False),
    st.tuples(st.text(), st.text()),
)
COMPLEX = st.complex_numbers(allow_nan=False)
VALUES = st.recursive(
    st.one_of(KEYS, st.integers(), st.builds(bytearray, st.binary()), COMPLEX),
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


@settings(max_examples=30)
@given(VALUES, st.sampled_from(PROTOCOLS))
def test_plain_values_are_read_as_by_python(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    got = read(data)
    assert got == value == pickle.loads(data)
    assert isinstance(value, type(got))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_containers_become_plain_ones_and_keep_their_order(protocol: int) -> None:
    values = [
        collections.OrderedDict(b=1, a=[2]),
        collections.Counter("hello"),
        collections.defaultdict(list, {"x": [1]}),
        {"z", 1},
        frozenset({None}),
    ]
    got = read(pickle.dumps(values, protocol))
    assert got == values
    assert list(map(type, got)) == [dict, dict, dict, set, frozenset]
    assert list(got[0]) == ["b", "a"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_is_shared_stays_shared(protocol: int) -> None:
    inner: list = [1]
    inner.append(inner)
    first, second = read(pickle.dumps([inner, inner], protocol))
    assert first is second
    assert first[1] is first


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_become_records_without_their_numbers(protocol: int) -> None:
    for array in (np.arange(12.0).reshape(3, 4), np.array(7, dtype=np.uint8)):
        got = read(pickle.dumps([array, array], protocol))
        assert got[0] is got[1]
        assert (got[0].kind, got[0].args, got[0].state) == ("numpy.ndarray", (), None)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_numbers_of_numpy_become_plain_ones(protocol: int) -> None:
    big_endian = np.dtype(">i4").type(7)
    got = read(pickle.dumps([np.float64(0.1), np.int64(-3), np.bool_(True), big_endian], protocol))
    assert got == [0.1, -3, True, 7]
    assert list(map(type, got)) == [float, int, bool, int]


def test_texts_of_python_2_are_latin_1() -> None:
    assert read(b"\x80\x02U\x04caf\xe9.") == "café"
    assert read(b"S'caf\\xe9\\n\\'\\\\'\np0\n.") == "café\n'\\"
    # As pickle.dumps(numpy.int64(200), 2) of Python 2.
    number = (
        b"\x80\x02cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\nU\x02i8K\x00K\x01\x87R"
        b"(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tbU\x08"
    )
    assert read(number + struct.pack("<q", 200) + b"\x86R.") == 200


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_become_records(protocol: int) -> None:
    settings = read(pickle.dumps(argparse.Namespace(n_layer=3, cutoffs=[1]), protocol))
    assert isinstance(settings, Instance)
    assert (settings.kind, settings.state) == (
        "argparse.Namespace",
        {"n_layer": 3, "cutoffs": [1]},
    )
    pattern = read(pickle.dumps(re.compile("a+"), protocol))
    assert isinstance(pattern, Instance)
    assert (pattern.kind, pattern.args) == ("re._compile", ("a+", re.compile("a+").flags))


def test_classes_of_forks_and_of_scripts_are_known_by_their_last_name() -> None:
    for module in ("mem_transformer", "my.fork.mem_transformer", "__main__"):
        found = read(b"\x80\x04" + named(module, "MemTransformerLM") + b")\x81}b.")
        assert isinstance(found, Instance)
        assert found.kind == f"{module}.MemTransformerLM"
        assert found.state == {}


def test_a_function_that_is_only_named_stays_a_name() -> None:
    found = read(b"\x80\x04" + named("torch.nn.functional", "relu") + b".")
    assert isinstance(found, Global)
    assert found.kind == "torch.nn.functional.relu"


TOUCH = short("touch marker") + b"\x85"
FORBIDDEN = [
    ("os", "system"),
    ("posix", "system"),
    ("nt", "system"),
    ("subprocess", "Popen"),
    ("builtins", "eval"),
    ("builtins", "exec"),
    ("builtins", "getattr"),
    ("builtins", "__import__"),
    ("__builtin__", "apply"),
    ("__main__", "anything"),
    ("operator", "attrgetter"),
    ("functools", "partial"),
    ("torch", "load"),
    ("torch.hub", "load"),
    ("torch.storage", "_load_from_bytes"),
    ("numpy", "load"),
    ("pickle", "loads"),
    ("runpy", "run_path"),
    ("collections_", "OrderedDict"),
]


@pytest.mark.parametrize("how", ["reduce", "newobj", "inst", "obj", "global"])
def test_what_no_checkpoint_needs_is_refused(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for module, name in FORBIDDEN:
        data = {
            "reduce": named(module, name) + TOUCH + b"R.",
            "newobj": named(module, name) + TOUCH + b"\x81.",
            "inst": b"(" + short("touch marker") + f"i{module}\n{name}\n.".encode(),
            "obj": b"(" + named(module, name) + short("touch marker") + b"o.",
            "global": f"c{module}\n{name}\n".encode() + TOUCH + b"R.",
        }[how]
        # Tensors within a pickle are refused with a remedy.
        said = f"refused: (the file names .*{name}, which|tensors were pickled without torch.save)"
        with pytest.raises(UnreadableFile, match=said):
            read(data)
        assert not list(tmp_path.iterdir()), (module, name)


def test_a_refusal_says_what_was_named_and_that_nothing_happened() -> None:
    text = re.escape(
        "refused: the file names posix.system, which no Transformer-XL checkpoint needs; nothing "
        "was executed"
    )
    with pytest.raises(UnreadableFile, match=text):
        read(b"cposix\nsystem\n.")
    with pytest.raises(UnreadableFile, match=r"x\\x1b\[2J\.y"):
        read(b"cx\x1b[2J\ny\n.")


def test_only_objects_have_attributes_to_set() -> None:
    names = named("torch.nn.functional", "relu"), named("collections", "OrderedDict")
    for target in (*names, short("text"), b"K\x01"):
        with pytest.raises(UnreadableFile, match="refused"):
            read(b"\x80\x04" + target + b"}" + short("__call__") + b"K\x01sb.")


def test_a_value_cannot_be_called() -> None:
    for target in (short("text"), b"]", named("mem_transformer", "X") + b")R"):
        with pytest.raises(UnreadableFile, match="refused"):
            read(target + b")R.")


N = 100_000
DEEP = {
    "tuples": b")" + b"\x85" * N + b".",
    "marked tuples": b"(" * N + b"t" * N + b".",
    "lists": b"]" * N + b"a" * (N - 1) + b".",
    "dictionaries": b"}" + b"K\x00}" * N + b"s" * N + b".",
    "objects": named("a.vocabulary", "V") + b"\x94)R" + b"h\x00)R" * N + b"b" * N + b".",
    "shared from shallow to deep": (
        b"(]\x94" + b"".join(b"]j" + struct.pack("<I", i) + b"a\x94" for i in range(2000)) + b"l."
    ),
}
CRASHING = {
    "tuples as a key": b"})" + b"\x85" * N + b"K\x00s.",
    "tuples in a set": b"\x8f()" + b"\x85" * N + b"\x90.",
    "shared tuples as a key": b"})" + b"2\x86" * 100 + b"K\x00s.",
    "new objects": (
        b"(" + named("copyreg", "__newobj__") + b"\x94" + b"h\x00" * N + b"t\x940h\x00h\x01R."
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
def test_deep_nesting_is_refused(name: str) -> None:
    with pytest.raises(UnreadableFile, match=r"nested more than 200 deep|MB of memory"):
        read(DEEP[name])


@pytest.mark.parametrize("name", CRASHING)
def test_what_would_crash_or_hang_python_is_refused(name: str) -> None:
    with pytest.raises(UnreadableFile):
        read(CRASHING[name])


def test_lists_that_are_shared_over_and_over_cost_nothing() -> None:
    # 10**100 elements if they were unfolded.
    data = b"\x80\x04]\x940" + b"".join(
        b"]\x94(" + bytes([ord("h"), i]) * 10 + b"e0" for i in range(100)
    )
    assert len(read(data + b"h\x64.")) == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "made",
    [
        named("builtins", "tuple") + b"h\x00\x85R0",
        named("builtins", "set") + b"h\x00\x85R0",
        named("torch", "Size") + b"h\x00\x85R0",
    ],
)
def test_copies_of_what_is_shared_are_limited(made: bytes) -> None:
    with pytest.raises(UnreadableFile, match="MB of memory"):
        read(b"\x80\x04(" + b"K\x01" * 20_000 + b"l\x940" + made * 1000 + b"N.")


def test_encoding_a_shared_text_over_and_over_is_refused() -> None:
    text = b"X" + struct.pack("<I", 100_000) + b"x" * 100_000 + b"\x940"
    call = named("_codecs", "encode") + b"h\x00" + short("latin1") + b"\x86R0"
    with pytest.raises(UnreadableFile, match="MB of memory"):
        read(text + call * 1000 + b"N.")


HOSTILE = {
    "memo index": b"\x80\x04j\x00\x00\x00\x80.",
    "bytes": b"\x8e" + struct.pack("<Q", 2**62) + b"x.",
    "bytearray": b"\x96" + struct.pack("<Q", 2**62) + b"x.",
    "text": b"\x8d" + struct.pack("<Q", 2**63) + b"x.",
    "signed length": b"T\xff\xff\xff\xffx.",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
    "digits": b"I" + b"9" * 1_000_000 + b"\n.",
    "long digits": b"L" + b"9" * 2000 + b"L\n.",
    "long bytes": b"\x8b" + struct.pack("<I", 10**6) + b"x" * 10**6 + b".",
    "long size": b"\x8b\xff\xff\xff\xff.",
    "not utf-8": b"\x8c\x01\xff.",
    "not utf-8 name": b"c\xff\n\xff\n.",
    "key": b"}]K\x00s.",
    "huge key": b"}\x8a\x10" + b"\x7f" * 16 + b"K\x00s.",
    "odd entries": b"}(K\x00u.",
    "empty stack": b".",
    "two values": b"NN.",
    "no mark": b"t.",
    "protocol": b"\x80\x06N.",
    "no instruction": b"\xffN.",
    "no end": b"N",
    "nothing": b"",
    "extension": b"\x82\x01.",
    "buffer": b"\x97.",
    "elsewhere": b"NQ.",
    "elsewhere too": b"Pname\n.",
    "named arguments": named("a.vocabulary", "V") + b")}" + short("x") + b"Ns\x92.",
    "named module": b"K\x01K\x02\x93.",
    "large bytes": named("builtins", "bytes") + b"J\xff\xff\xff\x7f\x85R.",
    "large bytearray": named("builtins", "bytearray") + b"J\xff\xff\xff\x7f\x85R.",
    "int of text": named("builtins", "int") + short("9" * 200) + b"\x85R.",
}


def test_damaged_pickles_are_refused() -> None:
    for name, data in HOSTILE.items():
        began = time.process_time()
        assert is_refused(data), name
        assert time.process_time() - began < 2, name


def test_numbers_of_numpy_that_lie_are_refused() -> None:
    for code, size in (("f4", 3), ("O", 8), ("O8", 8), ("S8", 8), ("f4,O", 12)):
        dtype = named("numpy", "dtype") + short(code) + b"\x89\x88\x87R(K\x03" + short("<")
        number = named("numpy._core.multiarray", "scalar") + dtype + b"NNNtb"
        content = b"\x80\x04" + number + b"C" + bytes([size]) + b"x" * size + b"\x86R."
        assert is_refused(content), code


def test_every_beginning_of_a_pickle_is_refused() -> None:
    value = {"words": ["a", "b"], "array": np.arange(3), "settings": argparse.Namespace(x=1)}
    for protocol in PROTOCOLS:
        data = pickle.dumps(value, protocol)
        for n in range(len(data)):
            with pytest.raises(UnreadableFile):
                load_pickle(BytesIO(data[:n]))


def test_many_tensors_and_arrays_of_few_bytes_are_refused() -> None:
    array = named("numpy._core.multiarray", "_reconstruct") + b"\x940"
    with pytest.raises(UnreadableFile, match="MB of memory"):
        read(array + b"h\x00)R0" * 100_000 + b"N.")


@pytest.mark.parametrize("name", ["vocab.pkl", "vocab_plain.pkl"])
def test_vocabularies_of_hugging_face_are_read(name: str, shared: Path) -> None:
    found = read((shared / "goldens" / "hf_tokenizer" / name).read_bytes())
    assert isinstance(found, dict)
    symbols = found["idx2sym"]
    assert found["sym2idx"] == {symbol: i for i, symbol in enumerate(symbols)}
    assert set(found["counter"]) - set(symbols) == set()
