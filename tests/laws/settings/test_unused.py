"""Settings that change nothing beside others are refused, and left out of what is stored."""

import json
import tomllib
from dataclasses import replace

import pytest
import tomli_w

from transformer_xl.config import Config, DataConfig, ModelConfig, TrainConfig
from transformer_xl.config.recipes import load_recipe
from transformer_xl.model.pretrained import ModelFolder

BASE = Config(model=ModelConfig(), data=DataConfig())
LSTM = {"kind": "lstm", "n_head": 8, "d_inner": 2048}
UNUSED = [
    (ModelConfig, {"attn_type": 3, "n_positions": 9}, {"clamp_len": 4}),
    (ModelConfig, {"attn_type": 2}, {"tie_biases": False}),
    (ModelConfig, {"attn_type": 3, "n_positions": 9}, {"tie_biases": False}),
    (ModelConfig, {}, {"quirks": ("stored_positions",)}),
    (ModelConfig, {"attn_type": 1, "n_positions": 9}, {"quirks": ("exact_frequencies",)}),
    (ModelConfig, {"attn_type": 2}, {"quirks": ("raw_queries",)}),
    (ModelConfig, {}, {"proj_same_dim": False}),
    (ModelConfig, {"n_features": 3}, {"tie_embeddings": False}),
    (ModelConfig, {"n_features": 3, "n_mixtures": 2}, {"sample_softmax": 5}),
    (ModelConfig, {"kind": "lstm"}, {"n_head": 4}),
    (ModelConfig, {"kind": "lstm"}, {"clamp_len": 4}),
    (ModelConfig, {"kind": "lstm"}, {"ext_len": 2}),
    (ModelConfig, {}, {"init_range": 0.2}),
    (ModelConfig, {"init": "uniform"}, {"embed_init_range": 0.2}),
    (ModelConfig, {"kind": "lstm"}, {"init": "uniform"}),
    (TrainConfig, {}, {"muon_lr": 0.05}),
    (TrainConfig, {}, {"momentum": 0.5}),
    (TrainConfig, {"optimizer": "sgd"}, {"beta1": 0.5}),
    (TrainConfig, {"optimizer": "sgd"}, {"beta2": 0.5}),
    (TrainConfig, {}, {"cooldown_fraction": 0.5}),
    (TrainConfig, {"average": "tail", "average_start": 0.5}, {"cooldown_fraction": 0.5}),
    (TrainConfig, {}, {"average_start": 0.5}),
    (TrainConfig, {"average": "tail"}, {"average_decay": 0.5}),
    (
        TrainConfig,
        {"schedule": "constant_cooldown", "cooldown_fraction": 0.0},
        {"average": "tail"},
    ),
    (DataConfig, {"vocab": "chars"}, {"vocab_size": 50}),
    (DataConfig, {"vocab": "bpe"}, {"vocab_from": "all"}),
    (DataConfig, {"vocab": "bpe", "tokenizer": "english"}, {"vocab_size": 1_000}),
    (DataConfig, {"vocab": "words", "tokenizer": "english"}, {"vocab_from": "all"}),
    (DataConfig, {"name": "hf:any/thing"}, {"path": "text.txt"}),
    (DataConfig, {"vocab": "features"}, {"valid_fraction": 0.2}),
]


def beside(settings):
    """A model of recordings and recordings go together."""
    if getattr(settings, "n_features", 0):
        return {"data": DataConfig(vocab="features")}
    if getattr(settings, "vocab", None) == "features":
        return {"model": ModelConfig(n_features=3)}
    return {}


def test_a_setting_that_changes_nothing_is_refused_and_left_out_of_what_is_stored(tmp_path):
    for section, base, unused in UNUSED:
        ((name, value),) = unused.items()
        kept = section(**base)
        with pytest.raises(ValueError, match=rf"^{name}=.* has no effect with .*; leave (it|out)"):
            section(**base | unused)
        # As an earlier version wrote it, into the folder of a run and of a model.
        where = {ModelConfig: "model", TrainConfig: "train", DataConfig: "data"}[section]
        config = replace(BASE, **beside(kept), **{where: kept})
        values = tomllib.loads(config.to_toml())
        values[where][name] = value
        (tmp_path / "recipe.toml").write_text(tomli_w.dumps(values))
        assert load_recipe(tmp_path / "recipe.toml", is_stored=True) == config, (base, unused)
        with pytest.raises(ValueError, match=f"{name}=.* has no effect"):
            load_recipe(tmp_path / "recipe.toml")
        if section is ModelConfig:
            ModelFolder(tmp_path).write(kept, {})
            content = json.loads((tmp_path / "config.json").read_text()) | unused
            (tmp_path / "config.json").write_text(json.dumps(content))
            assert ModelFolder(tmp_path).read_config() == kept, (base, unused)


def test_layers_that_differ_are_not_compiled_as_one():
    model, train = ModelConfig(n_layer=2, layer_attn_lens=(3, 9)), TrainConfig(compile="layers")
    with pytest.raises(ValueError, match="compile='layers' needs layers that are alike"):
        Config(model=model, data=DataConfig(), train=train)
