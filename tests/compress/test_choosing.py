"""A shipped model is chosen by content, and found by the checksum in an archive."""

import pytest
import torch

from transformer_xl.apps.compress import Settings, choose, compress, decompress, find
from transformer_xl.apps.compress.choosing import PART_BYTES, sample_of
from transformer_xl.config import files
from transformer_xl.inference.generate import from_pretrained
from transformer_xl.model import TransformerXL

NOTES = b"so it goes, " * 40
# Of the characters of the model, but for the last.
TOY = b"the cat saw a dog and ran to the sea.\n" * 20


def test_the_model_that_needs_the_fewest_bits_is_chosen(shipped):
    for data, name in ((NOTES, "notes-2"), (TOY, "toy-1")):
        choice = choose(data)
        assert choice.shipped.full_name == name
        assert list(choice.bits_per_byte.values()) == sorted(choice.bits_per_byte.values())
        own = compress(data, choice.model, choice.vocab)
        bits = choice.bits_per_byte[choice.shipped.name]
        assert bits == pytest.approx(own.coded_bits / len(data))
        for other in choice.bits_per_byte:
            assert own.coded_bits <= compress(data, *from_pretrained(other)).coded_bits


def test_a_model_that_cannot_represent_all_of_it_is_ruled_out(shipped):
    # Only outside the sample there is a character that the better model lacks.
    data = (TOY * 100)[: 4 * PART_BYTES] + "Ω".encode() + (TOY * 100)[: 7 * PART_BYTES]
    assert "Ω".encode() not in sample_of(data)
    choice = choose(data, Settings(streams=64))
    assert [*choice.bits_per_byte] == ["toy", "notes"]
    assert choice.shipped.full_name == "notes-2"


def test_what_no_model_can_represent_is_explained(shipped, tmp_path, monkeypatch):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "toy-1").symlink_to(shipped / "toy-1")
    monkeypatch.setattr(files, "SHIPPED", tmp_path / "root")
    with pytest.raises(ValueError, match=r"toy: byte 0 is not UTF-8.*--learn"):
        choose(b"\xff\xfe")
    monkeypatch.setattr(files, "SHIPPED", tmp_path / "none")
    with pytest.raises(ValueError, match="no shipped models to choose from: give a model"):
        choose(NOTES)


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


@pytest.mark.parametrize("n", [0, 1, 3 * PART_BYTES, 3 * PART_BYTES + 1, 100_003])
def test_a_sample_is_short_and_of_whole_characters(n):
    text = ("aß東🙂" * n).encode()[: n + 3]
    text = text.decode("utf-8", "ignore").encode()
    sample = sample_of(text)
    sample.decode()
    assert len(sample) <= 3 * PART_BYTES + 3
    assert text.startswith(sample[:PART_BYTES])
    assert text.endswith(sample[-PART_BYTES + 3 :])
    if len(text) <= 3 * PART_BYTES:
        assert sample == text
    noise = bytes(range(128, 192)) * n
    assert len(sample_of(noise)) <= max(len(noise), 3 * PART_BYTES + 12)
