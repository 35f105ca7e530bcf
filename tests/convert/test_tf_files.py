"""Checkpoints of TensorFlow: those that it wrote, and those of a small writer here."""

import struct

import pytest
import torch
from tests.convert.test_protobuf import field, written

from transformer_xl.errors import CheckpointError, InputError
from transformer_xl.interop.convert.old_checkpoints import find_weights
from transformer_xl.interop.convert.tf_files import read_tensorflow

NUMBERS = {
    torch.float32: 1,
    torch.float64: 2,
    torch.int32: 3,
    torch.uint8: 4,
    torch.int16: 5,
    torch.int8: 6,
    torch.int64: 9,
    torch.bool: 10,
    torch.bfloat16: 14,
    torch.float16: 19,
}


def masked_crc(content):
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def block(entries, kind=b"\x00"):
    content = bytearray()
    before = b""
    for key, value in entries.items():
        shared = 0
        while shared < min(len(key), len(before)) and key[shared] == before[shared]:
            shared += 1
        own = key[shared:]
        content += written(shared) + written(len(own)) + written(len(value)) + own + value
        before = key
    content += struct.pack("<II", 0, 1)
    return bytes(content) + kind + masked_crc(content + kind)


def table(entries, kind=b"\x00"):
    """An index of two blocks."""
    names = list(entries)
    parts = [names[: len(names) // 2], names[len(names) // 2 :]]
    content, handles = b"", {}
    for part in parts:
        own = block({name: entries[name] for name in part}, kind)
        handles[part[-1] if part else b""] = written(len(content)) + written(len(own) - 5)
        content += own
    index = block(handles)
    footer = written(0) + written(0) + written(len(content)) + written(len(index) - 5)
    return content + index + footer.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)


def entry(x, shard, start, **changes):
    shape = changes.get("shape", list(x.shape))
    assert isinstance(shape, list)
    sizes = b"".join(field(2, field(1, n) if n else b"") for n in shape)
    numbers = {1: NUMBERS[x.dtype], 3: shard, 4: start, 5: x.numel() * x.element_size()}
    numbers |= {int(key[1:]): n for key, n in changes.items() if isinstance(n, int)}
    return (
        field(1, numbers[1]) + field(2, sizes) + b"".join(field(i, numbers[i]) for i in (3, 4, 5))
    )


def write(prefix, tensors, n_shards=1):
    shards = [bytearray() for _ in range(n_shards)]
    entries = {b"": field(1, n_shards)}
    for i, name in enumerate(sorted(tensors)):
        x = tensors[name].contiguous()
        shard = i % n_shards
        entries[name.encode()] = entry(x, shard, len(shards[shard]))
        shards[shard] += bytes(x.view(-1).view(torch.uint8).numpy())
    write_index(prefix, entries)
    for i, content in enumerate(shards):
        prefix.with_name(f"{prefix.name}.data-{i:05d}-of-{n_shards:05d}").write_bytes(content)
    return entries


def write_index(prefix, entries):
    prefix.with_name(f"{prefix.name}.index").write_bytes(table(entries))


def some_tensors():
    found = {f"transformer/{dtype}": torch.arange(7).to(dtype).view(7, 1) for dtype in NUMBERS}
    return found | {"global_step": torch.tensor(3), "transformer/w/Adam": torch.ones(2, 3)}


@pytest.mark.parametrize("n_shards", [1, 3])
def test_variables_of_all_types_are_read(n_shards, tmp_path):
    tensors = some_tensors()
    write(tmp_path / "model.ckpt-1", tensors, n_shards)
    got = read_tensorflow(tmp_path / "model.ckpt-1.index")
    assert set(got) == set(tensors)
    for name, x in tensors.items():
        assert got[name].dtype == x.dtype
        assert torch.equal(got[name], x)


@pytest.mark.parametrize("name", ["", "m.index", "m.meta", "m.data-00000-of-00001", "m"])
def test_a_checkpoint_is_found_by_any_of_its_names(name, tmp_path):
    write(tmp_path / "m", {"x": torch.ones(1)})
    assert find_weights(tmp_path / name) == tmp_path / "m.index"


@pytest.mark.parametrize(
    "text", ["m-2", "/home/someone/run/m-2", "C:\\\\run\\\\m-2", "../../m-2", "./m-2"]
)
def test_a_folder_says_which_checkpoint_is_the_last(text, tmp_path):
    for name in ("m-1", "m-2"):
        write(tmp_path / name, {"x": torch.ones(1)})
    record = f'model_checkpoint_path: "{text}"\nall_model_checkpoint_paths: "m-1"\n'
    (tmp_path / "checkpoint").write_text(record)
    assert find_weights(tmp_path) == tmp_path / "m-2.index"


@pytest.mark.parametrize("text", ["", 'model_checkpoint_path: ""', 'model_checkpoint_path: ".."'])
def test_a_folder_with_several_checkpoints_is_not_guessed(text, tmp_path):
    (tmp_path / "checkpoint").write_text(text)
    for name in ("m-1", "m-2"):
        write(tmp_path / name, {"x": torch.ones(1)})
    with pytest.raises(InputError, match="name the file"):
        find_weights(tmp_path)
    with pytest.raises(FileNotFoundError):
        find_weights(tmp_path / "m-3")


def one():
    return torch.ones(4)


LYING = {
    "beyond": entry(one(), 0, 8),
    "far beyond": entry(one(), 0, 2**63),
    "more bytes": entry(one(), 0, 0, n5=20),
    "less bytes": entry(one(), 0, 0, n5=12),
    "huge bytes": entry(one(), 0, 0, n5=2**62),
    "huge shape": entry(one(), 0, 0, shape=[2**62, 2**62]),
    "huge and empty": entry(one(), 0, 0, shape=[2**62, 0], n5=0),
    "negative shape": entry(one(), 0, 0, shape=[2**64 - 4]),
    "dimensions": entry(one(), 0, 0, shape=[1] * 8 + [4]),
    "shard": entry(one(), 1, 0),
    "slices": entry(one(), 0, 0) + field(7, b""),
    "cut": entry(one(), 0, 0)[:-1],
    "no varint": b"\x08" + b"\xff" * 11,
}


def test_tables_that_lie_are_refused(tmp_path):
    entries = write(tmp_path / "m", {"x": one()})
    assert torch.equal(read_tensorflow(tmp_path / "m.index")["x"], one())
    for name, lie in LYING.items():
        write_index(tmp_path / "m", entries | {b"x": lie})
        try:
            read_tensorflow(tmp_path / "m.index")
        except (CheckpointError, FileNotFoundError):
            continue
        pytest.fail(f"{name} is read")


def test_variables_that_overlap_are_refused(tmp_path):
    entries = write(tmp_path / "m", {"x": one(), "y": one()})
    write_index(tmp_path / "m", entries | {b"y": entry(one(), 0, 12)})
    with pytest.raises(CheckpointError, match="overlaps"):
        read_tensorflow(tmp_path / "m.index")


def test_a_place_that_is_no_number_is_refused(tmp_path):
    entries = write(tmp_path / "m", {"x": one(), "y": one()})
    write_index(tmp_path / "m", entries | {b"y": entry(one(), 0, 16) + field(4, b"")})
    with pytest.raises(CheckpointError, match=r"m\.index: damaged .*TypeError"):
        read_tensorflow(tmp_path / "m.index")


def test_what_is_not_supported_is_named(tmp_path):
    entries = write(tmp_path / "m", {"x": one()})
    write_index(tmp_path / "m", entries | {b"x": LYING["slices"]})
    with pytest.raises(CheckpointError, match="partitioner"):
        read_tensorflow(tmp_path / "m.index")
    write_index(tmp_path / "m", entries | {b"": field(1, 1) + field(2, 1)})
    with pytest.raises(CheckpointError, match="big-endian"):
        read_tensorflow(tmp_path / "m.index")
    (tmp_path / "m.index").write_bytes(table(entries, b"\1"))
    with pytest.raises(CheckpointError, match="compressed"):
        read_tensorflow(tmp_path / "m.index")


def test_a_damaged_table_is_noticed(tmp_path):
    write(tmp_path / "m", {"x": one(), "y": torch.ones(2)})
    path = tmp_path / "m.index"
    content = path.read_bytes()
    # The footer has bytes that mean nothing.
    for i in range(len(content) - 48):
        path.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        with pytest.raises(CheckpointError):
            read_tensorflow(tmp_path / "m.index")
    for n in range(len(content)):
        path.write_bytes(content[:n])
        with pytest.raises(CheckpointError):
            read_tensorflow(tmp_path / "m.index")


def test_files_that_are_missing_or_cut_are_refused(tmp_path):
    write(tmp_path / "m", {"x": one()})
    data = tmp_path / "m.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="data-00000"):
        read_tensorflow(tmp_path / "m.index")
    data.unlink()
    with pytest.raises(FileNotFoundError, match="data-00000"):
        read_tensorflow(tmp_path / "m.index")
    with pytest.raises(FileNotFoundError):
        read_tensorflow(tmp_path / "nothing.index")
