import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from transformer_xl.model import TransformerXL
from transformer_xl.model.pretrained import ModelFolder


def edit_config(folder, **changes):
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: x for key, x in values.items() if x is not ...}))


def test_what_is_tied_is_saved_once_and_tied_again(tiny_config, tmp_path):
    model = TransformerXL(replace(tiny_config, d_embed=6, tie_projections=True))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert {name for name in saved if "layers" not in name} == {
        "embedding.weight",
        "embedding.proj.weight",
        "content_bias",
        "position_bias",
        "softmax.bias",
    }
    again = TransformerXL.from_pretrained(tmp_path)
    assert again.softmax.weight is again.embedding.weight
    assert again.softmax.proj.weight is again.embedding.proj.weight


def test_a_run_folder_gives_its_best_model_or_else_its_last(tiny_config, tmp_path):
    TransformerXL(tiny_config).save_pretrained(tmp_path / "model" / "last")
    assert ModelFolder.find(tmp_path).path == tmp_path / "model" / "last"
    TransformerXL(replace(tiny_config, n_layer=1)).save_pretrained(tmp_path / "model" / "best")
    assert ModelFolder.find(str(tmp_path)).path == tmp_path / "model" / "best"
    assert TransformerXL.from_pretrained(tmp_path).config.n_layer == 1


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_half_a_model_is_none(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(FileNotFoundError, match=r"neither a model folder .* nor a run folder"):
        TransformerXL.from_pretrained(folder)


@pytest.mark.parametrize("damage", ["empty", "cut", "cut in the header", "pickle", "folder"])
def test_damaged_weights_are_an_error_that_names_the_file(folder, damage):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    damaged = {"empty": b"", "cut": content[:-4], "cut in the header": content[:50]}
    path.unlink()
    if damage == "pickle":
        torch.save({"content_bias": torch.zeros(1)}, path)
    elif damage == "folder":
        path.mkdir()
    else:
        path.write_bytes(damaged[damage])
    error = FileNotFoundError if damage == "folder" else RuntimeError
    with pytest.raises(error, match=r"model.safetensors"):
        TransformerXL.from_pretrained(folder)


def test_weights_of_another_model_are_an_error_that_names_some(tiny_config, folder):
    edit_config(folder, n_layer=2)
    with pytest.raises(RuntimeError, match=r"does not fit config.json: layers\.2\..* and \d+ more"):
        TransformerXL.from_pretrained(folder)
    edit_config(folder, n_layer=3, vocab_size=30)
    with pytest.raises(
        RuntimeError, match=r"embedding.weight of shape \(31, 16\) instead of \(30, 16\)"
    ):
        TransformerXL.from_pretrained(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff\xfe", b'{"vocab_size": 3}'])
def test_settings_that_are_none_are_an_error_that_names_the_file(folder, content):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(RuntimeError, match=r"config.json is no settings file of a model"):
        TransformerXL.from_pretrained(folder)


def test_a_model_of_another_kind_is_named(folder):
    edit_config(folder, model_type="gpt2")
    with pytest.raises(RuntimeError, match="model of type 'gpt2', not 'transformer-xl'"):
        TransformerXL.from_pretrained(folder)


@pytest.mark.parametrize("version", [2, 99, "1", None])
def test_a_newer_or_senseless_format_is_an_error_with_its_remedy(folder, version):
    edit_config(folder, format_version=version)
    with pytest.raises(RuntimeError, match=r"reads up to 1: update transformer_xl"):
        TransformerXL.from_pretrained(folder)


def test_a_disk_error_leaves_the_old_model(tiny_config, folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformer_xl.model.pretrained.save_file", fail)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        TransformerXL(tiny_config).save_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
