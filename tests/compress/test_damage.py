"""Damaged and hostile files: refused in words, never restored to something else."""

import random
import zlib
from contextlib import suppress

import msgspec
import numpy as np
import pytest
import torch

from transformer_xl.apps.compress import (
    ArchiveError,
    Settings,
    compress,
    contents,
    decompress,
    store,
)
from transformer_xl.apps.compress.header import VERSION, Learning, pack, unpack
from transformer_xl.apps.compress.planning import plan, too_much
from transformer_xl.apps.compress.transforms import TRANSFORMS
from transformer_xl.model import TransformerXL


@pytest.fixture(scope="module")
def data(surprising):
    return surprising[:480]


@pytest.fixture(scope="module")
def content(model, vocab, data):
    torch.set_num_threads(1)
    found = compress(data, model, vocab, Settings(streams=12, segment_len=16))
    assert unpack(found.content)[0].coding.streams == 12
    return found.content


def _forged(content, payload=None, coding=None, **fields):
    """The same file with another header, whose checksums are right."""
    header, old = unpack(content)
    payload = old if payload is None else payload
    coded = msgspec.structs.replace(header.coding, **(coding or {}))
    fields = {"coding": coded, "payload_crc": zlib.crc32(payload), **fields}
    return pack(msgspec.structs.replace(header, **fields), payload)


def test_a_flipped_bit_is_found_wherever_it_is(model, vocab, content):
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(ArchiveError):
            decompress(bytes(damaged), model, vocab)


def test_a_file_that_is_cut_off_or_goes_on_is_refused(model, vocab, content):
    for length in range(len(content)):
        with pytest.raises(ArchiveError):
            decompress(content[:length], model, vocab)
    with pytest.raises(ArchiveError, match="damaged or truncated"):
        decompress(content + b"\0", model, vocab)


def test_anything_else_is_no_such_file(noise):
    for other in (b"", b"TXL", b"\x1f\x8b" + noise, noise):
        with pytest.raises(ArchiveError, match="not a file of txl compress"):
            decompress(other)
    with pytest.raises(ArchiveError, match=f"format {VERSION + 1}"):
        decompress(b"TXLZ" + bytes([VERSION + 1]) + noise)
    for header in (b"", b"\x90", b"\xff" * 40, b"\x91" * 400, msgspec.msgpack.encode([1, "x"])):
        prefix = b"TXLZ" + bytes([VERSION]) + len(header).to_bytes(2, "little")
        with pytest.raises(ArchiveError, match="header is invalid"):
            decompress(prefix + zlib.crc32(header).to_bytes(4, "little") + header)


def test_another_model_is_refused_before_it_computes(model, vocab, content, tiny):
    with pytest.raises(ValueError, match="another model"):
        decompress(content, TransformerXL(tiny), vocab)
    with pytest.raises(ValueError, match="compressed with a model"):
        decompress(content)


@pytest.mark.parametrize(
    ("coding", "reason"),
    [
        ({"n_tokens": 1 << 48}, "cannot be"),
        ({"n_tokens": 481}, "cannot be"),
        ({"n_tokens": 479}, "cannot be"),
        ({"streams": 481}, "cannot be"),
        ({"streams": 0}, "header is invalid"),
        ({"streams": 1 << 20}, "header is invalid"),
        ({"segment_len": 0}, "header is invalid"),
        ({"n_tokens": -1}, "header is invalid"),
        ({"model": b""}, "header is invalid"),
        ({"streams": 11}, "computes different probabilities"),
        ({"mem_len": 1 << 16}, "is more than the"),
        ({"segment_len": 17}, "computes different probabilities"),
        ({"learning": Learning(False, 0, 1e-3, 1, "cpu")}, "computes different probabilities"),
        ({"counted": 0}, "computes different probabilities"),
        ({"counted": 1 << 49}, "header is invalid"),
        ({"transforms": 1 << len(TRANSFORMS)}, "header is invalid"),
    ],
    ids=str,
)
def test_other_settings_never_restore_something_else(model, vocab, content, coding, reason):
    with pytest.raises(ArchiveError, match=reason):
        decompress(_forged(content, coding=coding), model, vocab)


@pytest.mark.parametrize("transforms", range(1, 1 << len(TRANSFORMS)))
def test_forged_transforms_never_restore_something_else(model, vocab, content, data, transforms):
    # Undoing a transform may change nothing.
    with suppress(ArchiveError):
        forged = _forged(content, coding={"transforms": transforms})
        assert decompress(forged, model, vocab) == data


def test_a_forged_size_is_refused(model, vocab, content):
    for size in (0, 479, 481, 1 << 48):
        with pytest.raises(ArchiveError):
            decompress(_forged(content, size=size), model, vocab)
    stored = compress(b"abc", model, vocab).content
    header, payload = unpack(stored)
    longer = pack(msgspec.structs.replace(header, size=4), payload)
    with pytest.raises(ArchiveError, match="it stores 3 bytes and its header says 4"):
        decompress(longer)


@pytest.fixture
def allocated(monkeypatch):
    """The largest number of elements that one array of whatever library was made with."""
    largest = [0]

    def watch(module, name):
        make = getattr(module, name)

        def made(*args, **kwargs):
            found = make(*args, **kwargs)
            largest[0] = max(largest[0], found.numel() if torch.is_tensor(found) else found.size)
            return found

        monkeypatch.setattr(module, name, made)

    for name in ("zeros", "arange", "full", "pad"):
        watch(np, name)
    watch(torch.Tensor, "new_empty")
    watch(torch, "zeros")
    return largest


@pytest.mark.parametrize(
    ("coding", "reason"),
    [
        # A kilobyte that stands for more than a coder can put into it.
        ({"n_tokens": 1 << 30, "streams": 1}, "symbols cannot be coded in"),
        ({"n_tokens": 1 << 26, "streams": 1 << 12, "segment_len": 1}, "symbols cannot be coded in"),
        # What it can, but with more remembered, or more in a round, than anyone has RAM for.
        ({"n_tokens": 1 << 24, "streams": 1 << 8, "mem_len": 1 << 16}, "GB of RAM, and ram=4 GB"),
        ({"n_tokens": 1 << 24, "streams": 1 << 8, "segment_len": 1 << 16}, r"GB of RAM.*--ram"),
        ({"n_tokens": 1 << 24, "streams": 1 << 8, "counted": 1 << 40}, "GB of RAM"),
    ],
    ids=str,
)
def test_a_small_file_cannot_ask_for_much_ram(model, vocab, content, allocated, coding, reason):
    largest, allocated[0] = max(allocated[0], 1 << 16), 0
    # Each as a whole file: its digests are right, and its payload is two thousand bytes.
    forged = _forged(content, bytes(2000), coding, size=coding["n_tokens"])
    with pytest.raises(ArchiveError, match=reason):
        decompress(forged, model, vocab)
    assert allocated[0] <= largest


def test_room_is_taken_for_what_is_decoded(model, vocab, content, allocated):
    coding = {"n_tokens": 1 << 22, "streams": 16, "segment_len": 16, "mem_len": 8}
    payload = np.random.default_rng(0).bytes(100_000)
    forged = _forged(content, payload, coding, size=1 << 22)
    allocated[0] = 0
    with pytest.raises(ArchiveError, match="computes different probabilities"):
        decompress(forged, model, vocab)
    # It says that it is four million symbols, and the first checksum is wrong.
    assert allocated[0] < 1 << 17


def test_who_compresses_keeps_to_the_same_ram(model, vocab, data):
    with pytest.raises(ValueError, match=r"streams=64, .* GB of RAM, and ram=0.001 GB.*allow more"):
        compress(data, model, vocab, Settings(streams=64, ram=0.001))
    # Where they are not chosen, there are as many parts as there is RAM for.
    fewer = plan(model, "", 1 << 22, Settings(ram=0.02))
    assert 1 < fewer.streams < plan(model, "", 1 << 22, Settings()).streams == 256
    assert too_much(model.config, fewer, 0.02) is None
    with pytest.raises(ValueError, match="ram=0 must be at least"):
        Settings(ram=0)
    # It is read where as much is allowed.
    small = compress(data, model, vocab, Settings(streams=12)).content
    with pytest.raises(ArchiveError, match=r"ram=0\.0005 GB are allowed"):
        decompress(small, model, vocab, ram=0.0005)


def test_a_forged_payload_never_passes(model, vocab, data, content):
    draw = random.Random(0)
    _, payload = unpack(content)
    for _ in range(6):
        forged = bytearray(payload)
        forged[draw.randrange(len(forged))] ^= 1 << draw.randrange(8)
        # The last bits of a coded text may be anything: then it is the text that was coded.
        with suppress(ArchiveError):
            assert decompress(_forged(content, bytes(forged)), model, vocab) == data
    for forged in (b"", b"\xff" * 400, b"\0" * 400, b"123", np.random.default_rng(0).bytes(400)):
        with pytest.raises(ArchiveError):
            decompress(_forged(content, forged), model, vocab)


def test_damaged_xz_is_refused_and_takes_no_more_than_it_says(noise):
    content = store(bytes(100_000)).content
    header, payload = unpack(content)
    assert header.coding == "xz"
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(ArchiveError):
            decompress(bytes(damaged))
    forged = [{"size": size} for size in (0, 99_999, 100_001, 1 << 30)]
    forged += [{"payload": other} for other in (b"", noise, payload[:-8])]
    for fields in forged:
        other = fields.pop("payload", payload)
        fields["payload_crc"] = zlib.crc32(other)
        with pytest.raises(ArchiveError, match=r"it is damaged|unpacked with xz"):
            decompress(pack(msgspec.structs.replace(header, **fields), other))
    with pytest.raises(ArchiveError, match="allow more RAM"):
        decompress(content, ram=1e-4)


def test_a_small_file_of_xz_cannot_ask_for_much_ram(monkeypatch):
    data = bytes(1 << 20)
    # With a small dictionary: only what comes out is as large as the limit.
    content = store(data, ram=1e-4).content
    assert len(content) < 1_000
    assert decompress(content, ram=1 / 1024) == data
    header, payload = unpack(content)
    huge = pack(msgspec.structs.replace(header, size=1 << 48), payload)
    monkeypatch.setattr(contents.lzma, "LZMADecompressor", None)
    for archive, ram in ((content, 0.0009), (huge, 4)):
        why = rf"unpacks to [\d,]+ bytes, and ram={ram} GB are allowed; allow more \(--ram\)"
        with pytest.raises(ArchiveError, match=why):
            decompress(archive, ram=ram)


def test_archives_without_a_model_keep_their_format():
    # Older versions of the package read them.
    assert compress(b"abc", settings=Settings(learn=True)).content[4] == 3
    assert store(b"abc" * 1000).content[4] == 4
