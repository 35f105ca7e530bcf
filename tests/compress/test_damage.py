"""Damaged and hostile files: refused in words, never restored to something else."""

import random
import zlib
from contextlib import suppress

import msgspec
import numpy as np
import pytest
import torch

from transformer_xl.compress import Settings, compress, decompress
from transformer_xl.compress.header import VERSION, Coding, Learning, pack, unpack
from transformer_xl.nn import TransformerXL


@pytest.fixture(scope="module")
def data(surprising):
    return surprising[:480]


@pytest.fixture(scope="module")
def content(model, vocab, data):
    torch.set_num_threads(1)
    found = compress(data, model, vocab, Settings(streams=12, segment_len=16))
    assert found.streams == 12
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
        with pytest.raises(RuntimeError):
            decompress(bytes(damaged), model, vocab)


def test_a_file_that_is_cut_off_or_goes_on_is_refused(model, vocab, content):
    for length in range(len(content)):
        with pytest.raises(RuntimeError):
            decompress(content[:length], model, vocab)
    with pytest.raises(RuntimeError, match="damaged or cut off"):
        decompress(content + b"\0", model, vocab)


def test_anything_else_is_no_such_file(noise):
    for other in (b"", b"TXL", b"\x1f\x8b" + noise, noise):
        with pytest.raises(RuntimeError, match="no file of txl compress"):
            decompress(other)
    with pytest.raises(RuntimeError, match=f"format {VERSION + 1}"):
        decompress(b"TXLZ" + bytes([VERSION + 1]) + noise)
    for header in (b"", b"\x90", b"\xff" * 40, b"\x91" * 400, msgspec.msgpack.encode([1, "x"])):
        prefix = b"TXLZ" + bytes([VERSION]) + len(header).to_bytes(2, "little")
        with pytest.raises(RuntimeError, match="header cannot be"):
            decompress(prefix + zlib.crc32(header).to_bytes(4, "little") + header)


def test_another_model_is_refused_before_it_computes(model, vocab, content, tiny):
    other = TransformerXL(tiny)
    with pytest.raises(ValueError, match="another model"):
        decompress(content, other, vocab)
    with pytest.raises(ValueError, match="made with a model"):
        decompress(content)
    learned = compress(b"a" * 800, settings=Settings(learn=True, streams=80, segment_len=2)).content
    with pytest.raises(ValueError, match="without a model"):
        decompress(learned, model, vocab)


@pytest.mark.parametrize(
    ("coding", "reason"),
    [
        ({"n_tokens": 1 << 48}, "cannot be"),
        ({"n_tokens": 0}, "cannot be"),
        ({"n_tokens": 2}, "cannot be"),
        ({"n_tokens": 481}, "cannot be"),
        ({"n_tokens": 479}, "numbers that come out"),
        ({"streams": 481}, "cannot be"),
        ({"streams": 11}, "numbers that come out"),
        ({"mem_len": 1 << 16}, "remembers"),
        ({"mem_len": 9}, "numbers that come out"),
        ({"segment_len": 17}, "numbers that come out"),
        ({"learning": Learning(False, 0, 1e-3, 1, "cpu")}, "numbers that come out"),
    ],
    ids=str,
)
def test_other_settings_never_restore_something_else(model, vocab, content, coding, reason):
    with pytest.raises(RuntimeError, match=reason):
        decompress(_forged(content, coding=coding), model, vocab)


@pytest.mark.parametrize(
    "coding",
    [{"streams": 0}, {"streams": 1 << 20}, {"segment_len": 0}, {"n_tokens": -1}, {"model": b""}],
    ids=str,
)
def test_numbers_out_of_range_are_refused_by_the_header(model, vocab, content, coding):
    with pytest.raises(RuntimeError, match="header cannot be"):
        decompress(_forged(content, coding=coding), model, vocab)


def test_a_forged_size_is_refused(model, vocab, content):
    for size in (0, 479, 481, 1 << 48):
        with pytest.raises(RuntimeError):
            decompress(_forged(content, size=size), model, vocab)
    stored = compress(b"abc", model, vocab).content
    header, payload = unpack(stored)
    longer = pack(msgspec.structs.replace(header, size=4), payload)
    with pytest.raises(RuntimeError, match="3 bytes stand for 4"):
        decompress(longer)


def test_a_forged_payload_never_passes(model, vocab, data, content):
    draw = random.Random(0)
    _, payload = unpack(content)
    for _ in range(6):
        forged = bytearray(payload)
        forged[draw.randrange(len(forged))] ^= 1 << draw.randrange(8)
        # The last bits of a coded text may be anything: then it is the text that was coded.
        with suppress(RuntimeError):
            assert decompress(_forged(content, bytes(forged)), model, vocab) == data
    for forged in (b"", b"\xff" * 400, b"\0" * 400, b"123", np.random.default_rng(0).bytes(400)):
        with pytest.raises(RuntimeError):
            decompress(_forged(content, forged), model, vocab)


def test_a_model_that_learned_elsewhere_is_asked_for(model, vocab, content):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    learning = Learning(fresh=False, seed=0, lr=1e-3, threads=1, device="cuda")
    with pytest.raises(ValueError, match="on a GPU"):
        decompress(_forged(content, coding={"learning": learning}), model, vocab)


def test_a_header_says_all_that_it_is_told(content):
    header, payload = unpack(content)
    assert isinstance(header.coding, Coding)
    assert pack(header, payload) == content
    assert len(content) - len(payload) <= 160
