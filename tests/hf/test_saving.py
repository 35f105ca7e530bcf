"""Folders that transformers writes are read by our own loader, and verified by both."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from transformer_xl.cli import main
from transformer_xl.model import TransformerXL

pytest.importorskip("transformers")

from transformer_xl.hf import TransformerXLForCausalLM


@pytest.fixture
def model(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours")
    TransformerXL(config).save_pretrained(folder)
    return TransformerXLForCausalLM.from_pretrained(folder)


def test_a_model_in_several_files_comes_back_bit_for_bit(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert not (tmp_path / "model.safetensors").exists()
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    for again in (
        TransformerXL.from_pretrained(tmp_path),
        TransformerXLForCausalLM.from_pretrained(tmp_path).transformer,
    ):
        expected = dict(model.transformer.named_parameters())
        for name, x in again.named_parameters():
            assert torch.equal(x, expected[name])
    assert main(["doctor", str(tmp_path)]) == 0


@pytest.mark.parametrize("shards", [False, True])
def test_damage_is_found_by_both_loaders(model, tmp_path, shards):
    model.save_pretrained(tmp_path, **({"max_shard_size": "4KB"} if shards else {}))
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    content = bytearray(path.read_bytes())
    content[-3] ^= 16
    path.write_bytes(content)
    for kind in (TransformerXL, TransformerXLForCausalLM):
        with pytest.raises(RuntimeError, match="do not match its checksum"):
            kind.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["embedding.weight", "layers.0.attention.o_proj.weight"])
def test_a_missing_weight_is_refused_by_both_loaders(model, tmp_path, name):
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    for kind, message in (
        (TransformerXL, f"does not fit.*{name}"),
        (TransformerXLForCausalLM, f"transformer.{name} and 0 others are missing"),
    ):
        with pytest.raises(RuntimeError, match=message):
            kind.from_pretrained(tmp_path)


def test_several_files_take_the_place_of_one(model, tmp_path):
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        model.transformer.softmax.bias.add_(1)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    for again in (
        TransformerXL.from_pretrained(tmp_path),
        TransformerXLForCausalLM.from_pretrained(tmp_path).transformer,
    ):
        assert torch.equal(again.softmax.bias, model.transformer.softmax.bias)


def test_weights_that_would_not_load_again_are_refused(model, tmp_path):
    with pytest.raises(ValueError, match="is float64"):
        model.double().save_pretrained(tmp_path / "wide")
    assert not (tmp_path / "wide").exists()
