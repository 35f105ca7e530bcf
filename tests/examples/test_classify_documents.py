"""The recipe for documents of one's own: what it saves is what it has measured."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.data import train_vocab
from transformer_xl.model import TransformerXL

pytest.importorskip("transformers", reason="needs pip install 'transformer-xl[hf]'")
PROGRAM = Path(__file__).parents[2] / "examples" / "classify_documents.py"


@pytest.fixture(scope="module")
def program():
    spec = spec_from_file_location("classify_documents", PROGRAM)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(program, monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["x", *map(str, words)])
        program.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def folder(tmp_path):
    """Documents of two classes and several lengths, told apart by their first letter."""
    for name in "ab":
        (tmp_path / "letters" / name).mkdir(parents=True)
        for n in range(10):
            text = name + "xyz " * (n + 1)
            (tmp_path / "letters" / name / f"{n}.txt").write_text(text, "utf-8")
    return tmp_path / "letters"


pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_folder_becomes_a_classifier_that_tells_new_files(program, run, folder, tmp_path):
    out = tmp_path / "out"
    said = run("train", folder, "--out", out, "--segment_len", 8, "--epochs", 1)
    assert "2 classes, 16 documents to learn from and 4 to measure with" in said
    assert "of 4 documents are told right with the memory" in said
    assert "of 4 documents are told right without the memory" in said
    files = [folder / "a" / "9.txt", folder / "b" / "0.txt"]
    lines = [json.loads(line) for line in run("predict", out, *files).splitlines()]
    assert [line["file"] for line in lines] == [str(path) for path in files]
    # Read side by side by what has learned, it is the same.
    model = program.AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert (model.config.mem_len, model.config.segment_len) == (8, 8)
    with torch.no_grad():
        texts = [program.tokens_of(path, program.load_vocab(out)) for path in files]
        shares = program.reader(model)(texts).softmax(-1)
    for line, share in zip(lines, shares.tolist(), strict=True):
        assert [*line["probabilities"]] == ["a", "b"]
        assert [*line["probabilities"].values()] == pytest.approx(share, abs=1e-6)
        assert line["label"] == "ab"[share.index(max(share))]


def test_a_trained_model_can_be_the_beginning(run, folder, tmp_path):
    vocab = train_vocab("chars", ["abxyz "])
    config = ModelConfig(vocab_size=len(vocab), n_layer=1, n_head=1, d_model=8, d_inner=8)
    TransformerXL(config).save_pretrained(tmp_path / "begin", vocab)
    options = ("--begin", tmp_path / "begin", "--segment_len", 8, "--epochs", 1)
    run("train", folder, "--out", tmp_path / "out", *options)
    settings = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert (settings["vocab_size"], settings["n_layer"], settings["mem_len"]) == (len(vocab), 1, 8)
    assert settings["transformers"]["id2label"] == {"0": "a", "1": "b"}
    assert "a" in run("predict", tmp_path / "out", folder / "a" / "0.txt")


def test_documents_that_cannot_be_used_are_named(run, folder, tmp_path):
    train = ("train", folder, "--out", tmp_path / "out")
    (folder / "a" / "3.txt").write_bytes(b"")
    with pytest.raises(SystemExit, match=r"3\.txt is empty: take it away"):
        run(*train)
    (folder / "a" / "3.txt").write_bytes(b"a\xff")
    with pytest.raises(SystemExit, match=r"3\.txt is no UTF-8 at byte 1: convert it"):
        run(*train)
    for n in range(6):
        (folder / "a" / f"{n}.txt").unlink()
    with pytest.raises(SystemExit, match="a has 4 documents: at least 5"):
        run(*train)
    with pytest.raises(SystemExit, match="a has 0 folders: there must be one for each class"):
        run("train", folder / "a", "--out", tmp_path / "out")
    with pytest.raises(SystemExit, match="is not empty: choose another folder"):
        run("train", folder, "--out", folder)
