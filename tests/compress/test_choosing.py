"""A shipped model is chosen by content, and found by the checksum in an archive."""

import codecs
import lzma
import random
import shutil
import sys
from dataclasses import replace

import pytest
import torch

from transformer_xl.apps.compress import (
    Settings,
    choosing,
    compress,
    compress_best,
    decompress,
    find,
    needs_model,
)
from transformer_xl.apps.compress.choosing import PART_BYTES, PARTS, sample_of
from transformer_xl.config import ShippedModel, files
from transformer_xl.data import train_vocab
from transformer_xl.inference.generate import from_pretrained
from transformer_xl.model import TransformerXL, build_model

NOTES = b"so it goes, " * 40
NOISE = random.Random(0).randbytes(300)
# Of the characters of the model, but for the last.
TOY = b"the cat saw a dog and ran to the sea.\n" * 20


def drawn(text, n=600):
    """What a model of a text knows and xz cannot: its letters in no order."""
    return bytes(random.Random(0).choices(text, k=n))


def test_the_model_that_needs_the_fewest_bits_is_chosen(shipped):
    for text, name in ((NOTES, "notes-2"), (TOY, "toy-1")):
        found, choice = compress_best(drawn(text))
        assert found.model == choice.shipped.full_name == name
    assert len(found.content) < len(
        compress(drawn(TOY), *from_pretrained("notes"), Settings()).content
    )


def test_a_missing_library_is_named_before_models_are_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "constriction", None)
    with pytest.raises(RuntimeError, match="needs the library constriction"):
        compress_best(b"")


def test_a_model_that_cannot_represent_all_of_it_is_ruled_out(shipped, monkeypatch):
    monkeypatch.setattr(choosing, "_MARGIN", 1e9)
    # Only outside the sample there is a character that the better model lacks.
    text = drawn(TOY, 42 * PART_BYTES)
    data = text[: PART_BYTES + 9] + "Ω".encode() + text[PART_BYTES + 9 :]
    assert "Ω".encode() not in sample_of(data)
    said: list[str] = []
    compress_best(data, Settings(streams=64), say=said.append)
    start = "toy-1 is left out: the model's vocabulary (chars) cannot represent"
    assert any(x.startswith(start) for x in said)


def test_without_a_model_that_fits_xz_is_used_and_that_is_said(
    shipped, tmp_path, monkeypatch, tiny_config
):
    root, vocab = tmp_path / "root", train_vocab("bytes", [])
    shutil.copytree(shipped / "toy-1", root / "toy-1")
    wide = build_model(replace(tiny_config, vocab_size=len(vocab), d_inner=4096))
    wide.save_pretrained(root / "wide-1", vocab)
    (root / "wide-1" / "model.toml").write_text("")
    monkeypatch.setattr(files, "SHIPPED", root)
    said: list[str] = []
    small = Settings(ram=0.002)
    assert compress_best(drawn(TOY), small, say=said.append)[0].model == "toy-1"
    too_large = "wide-1 is left out: streams=1, segment_len=64, mem_len="
    assert said[0].startswith(too_large)
    said.clear()
    found, choice = compress_best(b"\xff\xfe", small, say=said.append)
    assert (found.method, choice) == ("stored", None)
    assert "toy-1 is left out: " in said[0]
    assert "byte 0 is not UTF-8" in said[0]
    assert said[1].startswith(too_large)
    assert said[2] == "stored: no shipped model is better"
    monkeypatch.setattr(files, "SHIPPED", tmp_path / "none")
    with pytest.raises(ValueError, match="no shipped models: give a model"):
        compress_best(NOTES)


@pytest.mark.parametrize("name", ["toy", "notes", "notes-1"])
def test_the_checksum_in_an_archive_names_its_model_in_any_version(shipped, name):
    data = TOY if name == "toy" else NOTES
    content = compress(data, *from_pretrained(name)).content
    choice = find(content)
    assert choice.shipped.folder == shipped / {"toy": "toy-1", "notes": "notes-2"}.get(name, name)
    assert decompress(content, choice.model, choice.vocab) == data


def test_a_checksum_that_no_model_has_is_named(shipped):
    model, vocab = from_pretrained("notes")
    assert isinstance(model, TransformerXL)
    with torch.no_grad():
        model.softmax.bias[0] += 1.0
    content = compress(NOTES, model, vocab).content
    with pytest.raises(ValueError, match=r"checksum [0-9a-f]{32}, which is none of .*notes-1, toy"):
        find(content)
    with pytest.raises(ValueError, match="it was compressed without a model"):
        find(compress(b"", model, vocab).content)


def test_a_sample_is_short_of_whole_characters_and_of_every_region():
    short = ("aß東🙂" * 900).encode()
    assert sample_of(short) == short
    # Twelve regions, each of characters of its own.
    text = "".join((chr(0x3041 + n) + "a") * 50_000 for n in range(PARTS)).encode()
    sample = sample_of(text)
    assert {*sample.decode()} == {*text.decode()}
    assert len(sample) <= PARTS * PART_BYTES
    noise = bytes(range(128, 192)) * 1000
    assert len(sample_of(noise)) == PARTS * PART_BYTES


@pytest.mark.usefixtures("shipped")
def test_models_are_chosen_by_the_changed_text(monkeypatch):
    samples: list[bytes] = []
    monkeypatch.setattr(choosing, "_compressed", lambda data, *_: samples.append(data))
    text = b"if x:\r\n\t\treturn\r\n" * 3000
    for n in range(20):
        # The parts of a sample begin at other places of a line.
        compress_best(b"#" * n + b"\r\n" + text)
    assert samples
    assert not any({*b"\r\t"} & {*sample} for sample in samples)


def test_the_smallest_of_models_and_xz_is_stored(shipped):
    for data, method in (
        (drawn(NOTES), "model"),
        # What is repeated, and what is no text.
        (NOTES, "xz"),
        (TOY + NOISE, "xz"),
        (NOISE, "stored"),
        (b"", "stored"),
    ):
        found, choice = compress_best(data)
        packed = lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)
        assert len(found.content) <= min(len(packed) + 40, len(data) + 80)
        assert found.method == found.report()["method"] == method
        assert needs_model(found.content) == (choice is not None) == (method == "model")
        assert found.model == (choice.shipped.full_name if choice else None)
        assert decompress(found.content, *(choice[1:] if choice else ())) == data


@pytest.mark.parametrize("data", [b"", codecs.BOM_UTF8])
def test_a_file_without_text_is_stored(shipped, data):
    result, choice = compress_best(data)
    assert (result.method, choice) == ("stored", None)
    assert decompress(result.content) == data


def test_a_short_file_is_read_once_by_each_model(shipped, monkeypatch):
    read = []
    monkeypatch.setattr(
        choosing, "compress", lambda *given: read.append(given[0]) or compress(*given)
    )
    compress_best(drawn(TOY))
    assert len(read) == len(ShippedModel.newest())
