"""Files of torch.save: what torch.load reads, without running what they name."""

import collections
import pickle
import struct
import sys
import types
import warnings
import zipfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from transformer_xl.errors import CheckpointError
from transformer_xl.interop.convert.torch_files import Instance, module_tensors, read_pickled

IS_ZIP = pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])


def save(value, path, is_zip=True):
    torch.save(value, path, _use_new_zipfile_serialization=is_zip)
    return path


def same(got, expected):
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor)
        assert got.dtype == expected.dtype
        assert got.stride() == expected.stride()
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert isinstance(got, dict)
        assert list(got) == list(expected)
        for name in expected:
            same(got[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert isinstance(got, list | tuple)
        assert len(got) == len(expected)
        for x, y in zip(got, expected, strict=True):
            same(x, y)
    else:
        assert got == expected


def all_kinds():
    base = torch.arange(24.0)
    tensors: dict[str, Any] = {
        str(dtype): torch.arange(5).to(dtype)
        for dtype in (
            *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
            *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        )
    }
    tensors |= {"view": base[4:20].view(4, 4).t(), "part": base[3:6], "scalar": base[7]}
    tensors |= {"empty": torch.empty(0, 3), "parameter": nn.Parameter(base.view(2, 12))}
    return {
        "state": collections.OrderedDict(tensors),
        "size": base.shape,
        "settings": {"lr": 0.1, "words": ["a", "b"], "n": 2**40},
    }


@IS_ZIP
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_tensors_are_read_as_by_torch(is_zip, protocol, tmp_path):
    path = tmp_path / "x.pt"
    torch.save(all_kinds(), path, pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)
    got = read_pickled(path)
    same(got, all_kinds())
    if protocol == 2:
        same(got, torch.load(path, weights_only=True))
    whole, part = got["state"]["parameter"], got["state"]["part"]
    assert part.data_ptr() == whole.data_ptr() + 3 * 4


@IS_ZIP
def test_a_tensor_under_two_names_is_one(is_zip, tmp_path):
    x = torch.ones(3)
    got = read_pickled(save({"a": x, "b": x, "c": x.view(3, 1)}, tmp_path / "x.pt", is_zip))
    assert got["b"].data_ptr() == got["a"].data_ptr()
    assert got["c"].data_ptr() == got["a"].data_ptr()


@IS_ZIP
def test_writing_into_a_tensor_leaves_the_file_alone(is_zip, tmp_path):
    path = save(torch.ones(3), tmp_path / "x.pt", is_zip)
    content = path.read_bytes()
    read_pickled(path).zero_()
    assert path.read_bytes() == content
    same(read_pickled(path), torch.ones(3))


def test_files_that_attack_or_are_cut_are_refused(shared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = shared / "goldens" / "security"
    with pytest.raises(CheckpointError, match=r"posix\.system.*nothing was executed"):
        read_pickled(folder / "malicious_model.pt")
    with pytest.raises(CheckpointError, match="not copied completely"):
        read_pickled(folder / "truncated_model.pt")
    assert not list(tmp_path.iterdir())


def rebuild(size, stride, offset=b"K\x00", numel=b"K\x04"):
    """A pickle of a tensor on a storage of four numbers."""
    storage = (
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    )
    call = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + numel + b"tQ"
    return call + offset + size + stride + b"\x89ccollections\nOrderedDict\n)RtR."


def archive(path, entries, compression=zipfile.ZIP_STORED):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(path, "w", compression) as file:
            for name, content in entries.items():
                file.writestr(name, content)
    return path


def entries_of(path):
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


BIG = b"\x8a\x08" + struct.pack("<q", 2**62)
ABSURD = {
    "repeats": rebuild(b"J\x00\x00\x00\x10\x85", b"K\x00\x85"),
    "repeats few": rebuild(b"K\x02K\x02\x86", b"K\x00K\x01\x86"),
    "too many": rebuild(b"K\x05\x85", b"K\x01\x85"),
    "beyond": rebuild(b"K\x02\x85", b"K\x04\x85"),
    "offset": rebuild(b"K\x04\x85", b"K\x01\x85", b"K\x01"),
    "negative offset": rebuild(b"K\x01\x85", b"K\x01\x85", b"J\xff\xff\xff\xff"),
    "negative size": rebuild(b"J\xff\xff\xff\xff\x85", b"K\x01\x85"),
    "negative stride": rebuild(b"K\x02\x85", b"J\xff\xff\xff\xff\x85", b"K\x03"),
    "huge": rebuild(BIG + BIG + b"\x86", BIG + b"K\x01\x86"),
    "huge and empty": rebuild(BIG + b"K\x00\x86", b"K\x01K\x01\x86"),
    "dimensions": rebuild(b"(" + b"K\x01" * 9 + b"t", b"(" + b"K\x01" * 9 + b"t"),
    "stride of another": rebuild(b"K\x02\x85", b"K\x01K\x01\x86"),
    "size of words": rebuild(b"X\x01\x00\x00\x00a\x85", b"K\x01\x85"),
    "number at -1": rebuild(b")", b")", b"J\xff\xff\xff\xff"),
    "number far away": rebuild(b")", b")", BIG),
    "number at a word": rebuild(b")", b")", b"X\x01\x00\x00\x00x"),
    "number nowhere": rebuild(b")", b")", b"N"),
    "no size": rebuild(b"N", b"N"),
    "numel more": rebuild(b"K\x01\x85", b"K\x01\x85", numel=b"K\x05"),
    "numel less": rebuild(b"K\x01\x85", b"K\x01\x85", numel=b"K\x03"),
    "numel huge": rebuild(b"K\x01\x85", b"K\x01\x85", numel=BIG),
    "numel negative": rebuild(b"K\x01\x85", b"K\x01\x85", numel=b"J\xff\xff\xff\xff"),
    "another storage": rebuild(b"K\x01\x85", b"K\x01\x85").replace(
        b"\x00\x00\x000X", b"\0\0\x009X"
    ),
    "another kind": rebuild(b"K\x01\x85", b"K\x01\x85").replace(b"FloatStorage", b"ComplexStorage"),
}


def test_a_proper_tensor_is_read_with_the_same_pickle(tmp_path):
    content = {"x/data.pkl": rebuild(b"K\x02K\x02\x86", b"K\x01K\x02\x86"), "x/data/0": bytes(16)}
    same(read_pickled(archive(tmp_path / "x.pt", content)), torch.zeros(2, 2).t())


@pytest.mark.parametrize("name", ABSURD)
def test_tensors_that_lie_are_refused(name, tmp_path):
    content = {"x/data.pkl": ABSURD[name], "x/data/0": bytes(16)}
    with pytest.raises(CheckpointError, match="damaged offset" if "number " in name else None):
        read_pickled(archive(tmp_path / "x.pt", content))


def test_compressed_entries_are_refused(tmp_path):
    content = entries_of(save(torch.zeros(1_000_000), tmp_path / "x.pt"))
    with pytest.raises(CheckpointError, match="compressed"):
        read_pickled(archive(tmp_path / "x.pt", content, zipfile.ZIP_DEFLATED))


@pytest.mark.parametrize("change", ["prefix", "order", "script", "code", "none"])
def test_archives_of_other_kinds_are_refused(change, tmp_path):
    content = entries_of(save({"a": torch.ones(2)}, tmp_path / "x.pt"))
    content |= {
        "prefix": {"y/data.pkl": content["x/data.pkl"]},
        "order": {"x/byteorder": b"big"},
        "script": {"x/constants.pkl": b"N."},
        "code": {"x/code/__torch__.py": b""},
        "none": {},
    }[change]
    if change == "none":
        del content["x/data.pkl"]
    with pytest.raises(CheckpointError):
        read_pickled(archive(tmp_path / "x.pt", content))


def directory(path):
    content = bytearray(path.read_bytes())
    return content, [i for i in range(len(content)) if content[i : i + 4] == b"PK\x01\x02"]


@pytest.mark.parametrize("field", [10, 20, 24, 42], ids=["method", "packed", "size", "offset"])
def test_a_directory_that_lies_is_refused(field, tmp_path):
    path = save({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "x.pt")
    content, places = directory(path)
    for place in places:
        lying = bytearray(content)
        lying[place + field] ^= 8
        path.write_bytes(lying)
        with pytest.raises(CheckpointError):
            read_pickled(path)


def test_entries_that_overlap_are_refused(tmp_path):
    path = save({"a": torch.ones(20), "b": torch.ones(20)}, tmp_path / "x.pt")
    content, places = directory(path)
    first, second = (i for i in places if b"x/data/" in content[i + 46 : i + 53])
    content[second + 42 : second + 46] = content[first + 42 : first + 46]
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="verlap"):
        read_pickled(path)


def test_an_entry_that_is_there_twice_is_refused(tmp_path):
    content = entries_of(save(torch.ones(2), tmp_path / "x.pt"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(tmp_path / "y.pt", "w") as file:
            for name in [*content, "x/data.pkl"]:
                file.writestr(name, content[name])
    with pytest.raises(CheckpointError, match="twice"):
        read_pickled(tmp_path / "y.pt")


def test_a_damaged_weight_is_noticed_in_an_archive(tmp_path):
    path = save(torch.ones(100), tmp_path / "x.pt")
    content = path.read_bytes()
    numbers = struct.pack("<f", 1) * 100
    path.write_bytes(content.replace(numbers, numbers[:200] + b"\1" + numbers[201:]))
    with pytest.raises(CheckpointError, match="Bad CRC-32"):
        read_pickled(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.replace(b"little_endian", b"little_endiam"),
        lambda content: content.replace(b"FloatStorage", b"LongStorages", 1),
        lambda content: content.replace(struct.pack("<q", 7), struct.pack("<q", 8), 1),
        lambda content: content.replace(struct.pack("<q", 7), struct.pack("<q", -1), 1),
        lambda content: content.replace(struct.pack("<q", 7), struct.pack("<q", 2**60), 1),
        lambda content: content[:-1],
        lambda content: content.replace(b"\xe9\x03", b"\xea\x03", 1),
    ],
)
def test_legacy_files_that_lie_are_refused(change, tmp_path):
    path = save({"a": torch.ones(7)}, tmp_path / "x.pt", is_zip=False)
    content = path.read_bytes()
    assert change(content) != content
    path.write_bytes(change(content))
    with pytest.raises(CheckpointError):
        read_pickled(path)


@IS_ZIP
def test_every_beginning_of_a_file_is_refused(is_zip, tmp_path):
    path = save({"a": torch.ones(7), "b": torch.ones(2).half()}, tmp_path / "x.pt", is_zip)
    content = path.read_bytes()
    for n in range(0, len(content), 41):
        path.write_bytes(content[:n])
        with pytest.raises(CheckpointError, match=r"x\.pt"):
            read_pickled(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"some text", "damaged or of another kind"),
        (b"", "x is empty: get a fresh copy of it"),
        (None, "not a regular file"),
        (pickle.dumps(torch.ones(2)), r"saves? it with torch\.save"),
    ],
)
def test_other_kinds_of_files_are_refused_with_a_remedy(content, message, tmp_path):
    path = tmp_path / "x"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises((CheckpointError, OSError), match=message):
        read_pickled(path)


def test_modules_of_todays_torch_are_read(tmp_path, monkeypatch):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))]
            self.lists = nn.ParameterList(parameters)
            self.norm = nn.BatchNorm1d(2)
            self.register_buffer("hidden", torch.ones(1), persistent=False)
            self.none = nn.Linear(2, 2, bias=False)

    module = Parts()
    # Pickled as a class of the old code, which is not there any more.
    Parts.__module__, Parts.__qualname__ = "mem_transformer", "Parts"
    old = types.ModuleType("mem_transformer")
    monkeypatch.setattr(old, "Parts", Parts, raising=False)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mem_transformer", old)
        torch.save(module, tmp_path / "x.pt")
    same(module_tensors(read_pickled(tmp_path / "x.pt")), dict(module.state_dict()))


def record(**state):
    return Instance("mem_transformer.X", state)


@pytest.mark.parametrize(
    "state",
    [{"_parameters": {"x": 3}}, {"_modules": {1: record()}}],
)
def test_modules_that_are_none_are_refused(state):
    with pytest.raises(CheckpointError):
        module_tensors(Instance("mem_transformer.X", state))


def test_parameter_lists_of_2019_keep_places_free():
    projections = record(_parameters={"0": None, "1": torch.ones(1)})
    got = module_tensors(record(_modules={"out_projs": projections, "gone": None}))
    assert list(got) == ["out_projs.1"]
