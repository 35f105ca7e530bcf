"""Weights files are verified when they are read, whoever wrote them."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from transformer_xl.cli import main
from transformer_xl.inference.generate import State
from transformer_xl.model import TransformerXL
from transformer_xl.model.pretrained import CHECKSUM_KEY, ModelFolder


@pytest.fixture
def weights(folder):
    return folder / "model.safetensors"


def rewrite(path, change=lambda tensors: None):
    """Write a weights file as another program would: without a checksum."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def shard(folder, n=2, **edits):
    """Divide the weights of a folder as transformers does."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names = sorted(tensors)
    places = {name: f"model-{1 + i % n:05}-of-{n:05}.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({x: tensors[x] for x in names if places[x] == file}, folder / file)
    index = {"metadata": {}, "weight_map": places | edits}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_flipped_bits_of_the_values_are_found(folder, weights):
    content = weights.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for place in torch.linspace(start, len(content) - 1, 30).long().tolist():
        damaged = bytearray(content)
        damaged[place] ^= 1
        weights.write_bytes(damaged)
        with pytest.raises(RuntimeError, match=r"model.safetensors is damaged"):
            TransformerXL.from_pretrained(folder)
    weights.write_bytes(content)
    TransformerXL.from_pretrained(folder)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.float64])
def test_weights_of_another_type_are_refused_by_name(folder, weights, dtype):
    def change(tensors):
        tensors["content_bias"] = tensors["content_bias"].to(dtype)

    rewrite(weights, change)
    with pytest.raises(RuntimeError, match=r"content_bias as [IFB].*F32, F16, BF16"):
        TransformerXL.from_pretrained(folder)


def test_weights_that_would_not_load_again_leave_what_was_there(paper, folder, tiny_config):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    other = TransformerXL(replace(tiny_config, n_layer=2))
    with pytest.raises(ValueError, match=r"is float64; weights are stored as float32.*float\(\)"):
        other.double().save_pretrained(folder)
    with torch.no_grad():
        paper.content_bias.fill_(float("nan"))
    with pytest.raises(ValueError, match="content_bias has values that are not finite"):
        paper.save_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_by_name(folder, weights, value):
    def change(tensors):
        tensors["position_bias"].view(-1)[3] = value

    rewrite(weights, change)
    with pytest.raises(RuntimeError, match="values of position_bias that are not finite"):
        TransformerXL.from_pretrained(folder)


def test_weights_without_a_checksum_load_with_a_note(paper, folder, weights, caplog):
    rewrite(weights)
    again = TransformerXL.from_pretrained(folder)
    assert "has no checksum" in caplog.text
    assert all(map(torch.equal, paper.parameters(), again.parameters()))
    caplog.clear()
    again.save_pretrained(folder)
    TransformerXL.from_pretrained(folder)
    assert not caplog.text


def test_the_same_weights_make_the_same_file(paper, tmp_path):
    for name in ("one", "two"):
        paper.save_pretrained(tmp_path / name)
    one, two = (ModelFolder(tmp_path / name).weights.checksum for name in ("one", "two"))
    assert one == two


def test_several_weights_files_are_one_model(paper, folder):
    shard(folder)
    again = TransformerXL.from_pretrained(folder)
    assert all(map(torch.equal, paper.parameters(), again.parameters()))
    assert main(["doctor", str(folder)]) == 0


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("../model-00001-of-00002.safetensors", "not the name of a file beside it"),
        ("/etc/passwd", "not the name of a file beside it"),
        ("..", "not the name of a file beside it"),
        (3, "is damaged or no index of weights"),
        ("x" * 300, "not the name of a file beside it"),
        ("model-00003-of-00003.safetensors", "which is missing"),
    ],
)
def test_an_index_names_files_beside_it_alone(folder, file, message):
    shard(folder, content_bias=file)
    with pytest.raises(RuntimeError, match=message):
        TransformerXL.from_pretrained(folder)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"weight_map": [1]}', b"\xff"])
def test_a_damaged_index_is_named(folder, content):
    shard(folder)
    (folder / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(RuntimeError, match=r"index.json"):
        TransformerXL.from_pretrained(folder)


def test_a_file_without_permission_is_not_called_damaged(folder, weights, monkeypatch):
    opened = os.open

    def refuse(path, *words, **named):
        if path == weights:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *words, **named)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match=r"Permission denied: .*model.safetensors"):
        TransformerXL.from_pretrained(folder)


def _flip(tensors, about):
    tensors["states"].neg_()


def _change_token(tensors, about):
    about["last_token"] = "2"


def _make_infinite(tensors, about):
    tensors["states"][0, 0, 0, 0] = torch.inf
    del about[CHECKSUM_KEY]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip, "do not match its checksum"),
        (_change_token, "do not match its checksum"),
        (_make_infinite, "states that are not finite"),
    ],
)
def test_a_damaged_memory_is_found(paper, tmp_path, damage, message):
    path = tmp_path / "state"
    _, mems = paper.read(torch.tensor([[1, 2, 3]]))
    State(source=mems, tokens=np.array([1])).save(path, "x")
    with safe_open(path, "pt") as file:
        about = file.metadata()
    tensors = load_file(path)
    damage(tensors, about)
    save_file(tensors, path, about)
    with pytest.raises(RuntimeError, match=message):
        State.load(path, "x", paper)
