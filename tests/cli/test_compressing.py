"""txl compress and txl decompress: files, pipes, and what must not be overwritten."""

import io
import random
import sys

import pytest

pytest.importorskip("constriction")
pytestmark = pytest.mark.usefixtures("one_thread")

_NOTES = b"so it goes, " * 40


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    import torch

    from transformer_xl.config import ModelConfig
    from transformer_xl.data import train_vocab
    from transformer_xl.model import TransformerXL

    folder = tmp_path_factory.mktemp("byte-model")
    config = ModelConfig(
        vocab_size=256, n_layer=1, n_head=2, d_model=8, d_inner=8, mem_len=4, init_std=0.3
    )
    torch.manual_seed(0)
    model = TransformerXL(config)
    with torch.no_grad():
        # It expects what the notes are made of.
        model.softmax.bias[[*_NOTES]] += 6.0
    model.save_pretrained(folder, train_vocab("bytes", []))
    return folder


@pytest.fixture
def notes(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes(_NOTES)
    return path


@pytest.fixture
def small(txl, notes, byte_model):
    """The notes compressed."""
    ended = txl("compress", notes, "--model", byte_model, "--streams", 8, "--json")
    assert ended.code == 0
    return notes.with_name("notes.txt.txl")


def test_a_file_comes_back(txl, notes, byte_model, tmp_path):
    settings = ("--learn", "--lr", 0.01, "--streams", 8, "--segment_len", 10, "--mem_len", 5)
    given = ("--model", byte_model, "--json")
    ended = txl("compress", notes, tmp_path / "x", *given, *settings)
    assert ended.code == 0
    found = ended.json
    assert found["compressed_bytes"] == (tmp_path / "x").stat().st_size < found["bytes"] == 480
    assert found["bits_per_byte"] == pytest.approx(8 * found["compressed_bytes"] / 480)
    ended = txl("decompress", tmp_path / "x", tmp_path / "y", *given)
    assert (ended.code, ended.json["bytes"]) == (0, 480)
    assert (tmp_path / "y").read_bytes() == notes.read_bytes()


def test_names_are_found_and_nothing_is_overwritten(txl, notes, small, byte_model):
    before = small.read_bytes()
    given = ("--model", byte_model)
    ended = txl("decompress", small, *given)
    assert ended.code == 1
    assert "notes.txt exists; --force overwrites it" in ended.err
    notes.write_bytes(b"changed")
    assert txl("compress", notes, *given).code == 1
    assert small.read_bytes() == before
    assert txl("decompress", small, *given, "--force").code == 0
    assert notes.read_bytes() == _NOTES
    ended = txl("decompress", notes)
    assert ended.code == 2
    assert "does not end in .txl" in ended.err


def test_pipes_take_and_give_bytes(small, byte_model, monkeypatch):
    from transformer_xl.cli import main

    def piped(given, *words):
        stdin, stdout = io.TextIOWrapper(io.BytesIO(given)), io.TextIOWrapper(io.BytesIO())
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", stdin)
            patch.setattr(sys, "stdout", stdout)
            assert main([*words, "-", "--model", str(byte_model)]) == 0
        return stdout.buffer.getvalue()

    assert piped(small.read_bytes(), "decompress") == _NOTES
    assert piped(_NOTES, "compress", "--streams", "8") == small.read_bytes()


def test_a_missing_library_is_named(txl, notes, monkeypatch):
    monkeypatch.setitem(sys.modules, "constriction", None)
    ended = txl("compress", notes, "--learn")
    assert ended.code == 1
    assert "pip install 'transformer-xl[compress]'" in ended.err


def test_of_an_empty_file_only_what_it_has_is_said(txl, byte_model, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    ended = txl("compress", tmp_path / "empty", "--model", byte_model)
    assert ended.code == 0
    about = dict(line.split(maxsplit=1) for line in ended.out.splitlines())
    assert about["bytes"] == "0"
    assert "None" not in ended.out
    assert not {"ratio", "bits_per_byte"} & about.keys()
    assert txl("decompress", tmp_path / "empty.txl", tmp_path / "again").code == 0
    assert (tmp_path / "again").read_bytes() == b""


def test_what_is_wrong_is_said_of_the_file_that_it_is_wrong_with(txl, notes, small, tmp_path):
    folder, empty = tmp_path / "folder", tmp_path / "empty"
    folder.mkdir()
    empty.write_bytes(b"")
    out = tmp_path / "out"
    # The input comes first, whatever else is there already.
    (tmp_path / "gone.txl").write_bytes(b"x")
    for words, reason in (
        (["compress", tmp_path / "gone", "--learn"], f"cannot read {tmp_path / 'gone'}: No such"),
        (["compress", folder, "--learn"], f"cannot read {folder}: Is a directory"),
        (["compress", notes, folder, "--learn"], f"{folder} is a folder: give a file in it"),
        (["compress", notes, notes, "--learn", "--force"], f"{notes} is the input file"),
        (["compress", notes, empty / "x", "--learn"], f"{empty} is a file, not a folder"),
        # A model that is none is not a damaged archive.
        (["decompress", small, out, "--model", folder], f"txl: {folder}"),
        (["decompress", empty, out], f"{empty}: it is not a file of txl compress"),
        (["compress", notes, out, "--learn", "--lr", "-1"], "lr=-1"),
        (["compress", notes, "-", "--learn", "--json"], "give an output file"),
    ):
        ended = txl(*words)
        assert ended.code in (1, 2), words
        assert reason in ended.err, words
        if "--model" in words:
            assert str(small) not in ended.err
    assert not out.exists()


def test_an_archive_of_what_does_not_shrink_needs_no_model(txl, byte_model, tmp_path):
    noise = tmp_path / "noise"
    noise.write_bytes(random.Random(0).randbytes(256))
    given = ("--model", byte_model)
    ended = txl("compress", noise, *given, "--learn", "--json")
    assert ended.json["method"] == "stored"
    assert "decompressed only on this kind of processor with this version of PyTorch" in ended.err
    ended = txl("decompress", tmp_path / "noise.txl", tmp_path / "out", *given)
    assert ended.code == 0
    assert f"noise.txl needs no model: --model {byte_model} is ignored" in ended.err
    assert (tmp_path / "out").read_bytes() == noise.read_bytes()


def test_what_does_not_come_back_is_not_written(txl, notes, byte_model, tmp_path, monkeypatch):
    from transformer_xl.apps import compress

    given = ("compress", notes, tmp_path / "x", "--model", byte_model, "--streams", 8, "--verify")
    for restored in (b"something else", compress.ArchiveError("the numbers")):

        def decompress(*args, restored=restored):
            if isinstance(restored, Exception):
                raise restored
            return restored

        monkeypatch.setattr(compress, "decompress", decompress)
        ended = txl(*given)
        assert ended.code == 2
        assert str(notes) in ended.err
        assert "no archive was written" in ended.err
        assert not (tmp_path / "x").exists()


def test_without_a_model_a_shipped_one_is_chosen_and_found_again(txl, notes, shipped, tmp_path):
    # The letters that it knows in no order, in which xz finds no repetition.
    data = bytes(random.Random(0).choices(_NOTES, k=600))
    notes.write_bytes(data)
    ended = txl("compress", notes, "--verify", "--json")
    assert (ended.code, ended.json["verified"]) == (0, True)
    assert ended.json["model"] == "notes-2"
    assert "using the shipped model notes (version 2)\n" in ended.err
    assert ended.json["method"] == "model"
    ended = txl("decompress", tmp_path / "notes.txt.txl", tmp_path / "again")
    assert (ended.code, (tmp_path / "again").read_bytes()) == (0, data)
    assert "using the shipped model notes (version 2), which compressed it" in ended.err


def test_a_memory_beyond_those_measured_is_said_of_a_shipped_model_too(txl, notes, shipped):
    notes.write_bytes(bytes(random.Random(0).choices(_NOTES, k=600)))
    assert "the evaluation settings of" in txl("compress", notes, "--mem_len", 500).err


def test_what_xz_packs_smaller_needs_neither_a_model_nor_the_library(txl, shipped, notes, tmp_path):
    ended = txl("compress", notes, tmp_path / "x", "--json")
    assert ended.json["method"] == "xz"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "constriction", None)
        assert txl("decompress", tmp_path / "x", tmp_path / "again").code == 0
    assert (tmp_path / "again").read_bytes() == notes.read_bytes()


@pytest.mark.parametrize("data", [b"\xef\xbb\xbfa cat\r\n" * 90, b"a\rb\r", b"\xff", b""], ids=str)
def test_bytes_come_back_as_they_were(txl, shipped, tmp_path, data):
    (tmp_path / "data").write_bytes(data)
    assert txl("compress", tmp_path / "data").code == 0
    assert txl("decompress", tmp_path / "data.txl", tmp_path / "again").code == 0
    assert (tmp_path / "again").read_bytes() == data
