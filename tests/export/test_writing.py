"""A program in another form is the model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from transformer_xl import export
from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.data.vocab_files import load_vocab
from transformer_xl.inference.generate import Sampling, generate
from transformer_xl.interop import export as writing
from transformer_xl.interop.export import Step
from transformer_xl.model.pretrained import ModelFolder

VOCAB = train_vocab("chars", ["abcdefghijklmnopqrstuvwxyz .,\n!"])

PROGRAMS = {
    "onnx": {},
    "onnx, all at once": {
        "cutoffs": (8, 20),
        "div_val": 2,
        "norm_first": True,
        "norm": "rms",
        "qk_norm": True,
        "activation": "geglu",
        "clamp_len": 4,
        "attn_len": 5,
        "tie_biases": False,
        "key_offset": True,
        "scalable_softmax": 3,
        "embedding_residual": True,
    },
    "onnx, learned": {"attn_type": 1, "n_positions": 6, "enhanced_recurrence": True},
    "torch": {"key_offset": True, "scalable_softmax": 3, "layer_attn_lens": (3, 6)},
}


def saved(model, folder):
    folder.mkdir()
    model.save_pretrained(folder, VOCAB)
    return folder


def runner(folder):
    """Run a program by its manifest alone."""
    about = json.loads((folder / "step.json").read_text())
    path = folder / about["program"]
    if about["format"] == "torch":
        return torch.export.load(path).module()
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each["name"] for each in about["inputs"]]
    results = [each["name"] for each in about["outputs"]]

    def run(*given):
        arrays = {name: x.numpy() for name, x in zip(names, given, strict=True)}
        return [torch.from_numpy(x) for x in session.run(results, arrays)]

    return run


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_what_the_model_says(made, steps_alike, tmp_path, name):
    if name.startswith("onnx"):
        pytest.importorskip("onnxscript")
    model = made(**PROGRAMS[name])
    n_tokens = 1 if name in ("onnx", "torch") else 3
    found = export(
        saved(model, tmp_path / "model"),
        tmp_path / "out",
        format=name[: 5 if name.startswith("torch") else 4],
        n_tokens=n_tokens,
    )
    assert found.folder == tmp_path / "out"
    assert found.difference is not None
    assert found.difference < 1e-5
    step, run = Step(model, n_tokens=n_tokens), runner(tmp_path / "out")
    for streams in (1, 3):
        assert steps_alike(model, step, run, streams=streams) < 1e-5


@pytest.mark.slow
@pytest.mark.compile
def test_the_folder_is_described_and_the_terminal_stays_clean(made, tmp_path, capfd, recwarn):
    source = saved(made(), tmp_path / "model")
    export(source, tmp_path / "out", format="torch", mem_len=7)
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("step.json", "step.pt2", "tokenizer.json", "vocab.json"),
    ]
    assert load_vocab(tmp_path / "out").hash == VOCAB.hash
    about = json.loads((tmp_path / "out" / "step.json").read_text())
    memory = [2, 2, "B", 7, 8]
    assert about["inputs"] == [
        {"name": "tokens", "dtype": "int64", "shape": ["B", 1]},
        {"name": "keys", "dtype": "float32", "shape": memory},
        {"name": "values", "dtype": "float32", "shape": memory},
        {"name": "seen", "dtype": "int64", "shape": ["B"]},
    ]
    assert [each["shape"] for each in about["outputs"]] == [["B", 1, 31], memory, memory, ["B"]]
    assert about["next"] == {"new_keys": "keys", "new_values": "values", "new_seen": "seen"}
    assert (about["start"], about["mem_len"], about["vocab_size"]) == ({"seen": 0}, 7, 31)
    assert about["difference"] < 1e-5
    # It was made of these weights.
    assert about["weights"] == ModelFolder(source).weights.checksum


@pytest.mark.slow
@pytest.mark.compile
def test_the_program_of_the_documents_writes_what_the_model_writes(made, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    model = made()
    export(saved(model, tmp_path / "model"), tmp_path / "demo-onnx")
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text("utf-8")
    program = page.split("```python\n# writes with numpy and onnxruntime")[1].split("```")[0]
    done = subprocess.run(
        [sys.executable, "-c", "#" + program, "the "],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    ids = VOCAB.encode("the ")
    expected = list(generate(model, ids, length=50, sampling=Sampling(temperature=0)))
    assert done.stdout == VOCAB.decode([*ids, *expected]) + "\n"


def test_a_program_that_says_something_else_does_not_appear(made, tmp_path, monkeypatch):
    def another(step, path):
        path.write_bytes(b"")
        return lambda *given: [x + 1e-4 for x in step(*given)[:1]] + [*step(*given)[1:]]

    monkeypatch.setattr(writing, "_write_torch", another)
    with pytest.raises(RuntimeError, match=r"off by 1.0e-04, .* was not written; another --format"):
        export(saved(made(), tmp_path / "model"), tmp_path / "out", format="torch")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_in_use_and_a_missing_package_are_named(made, tmp_path, monkeypatch):
    source = saved(made(), tmp_path / "model")
    with pytest.raises(FileExistsError, match="exists and is not empty: choose another folder"):
        export(source, source)
    # Where types are checked, it is refused before.
    with pytest.raises((ValueError, TypeError), match="gguf"):
        export(source, tmp_path / "out", format="gguf")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(RuntimeError, match=r"pip install 'transformer-xl\[onnx\]'"):
        export(source, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        export(tmp_path / "nowhere", tmp_path / "out", format="torch")


def test_a_model_without_a_vocabulary_is_exported_without(made, tmp_path, monkeypatch):
    made().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(writing, "_write_torch", lambda step, path: path.write_bytes(b"") or step)
    export(tmp_path / "model", tmp_path / "out", format="torch")
    assert json.loads((tmp_path / "out" / "step.json").read_text())["vocabulary"] is None
