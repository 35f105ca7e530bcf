"""Settings that cannot work are refused where they are written, with the rule they break."""

import dataclasses
import types
import typing

import pytest

from transformer_xl.config import (
    Config,
    DataConfig,
    EvalConfig,
    GenerateConfig,
    ModelConfig,
    TrainConfig,
)

SECTIONS = (ModelConfig, DataConfig, TrainConfig, EvalConfig, GenerateConfig)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (ModelConfig, {"n_head": 7}, "n_head=7 must divide d_model=512; .* set d_head"),
        (ModelConfig, {"d_model": 7, "n_head": 7}, "d_model=7 must be even"),
        (ModelConfig, {"n_layer": 0}, "n_layer=0 must be above 0"),
        (ModelConfig, {"d_head": 0}, "d_head=0 must be above 0"),
        (ModelConfig, {"d_embed": -1}, "d_embed=-1 must be above 0"),
        (ModelConfig, {"mem_len": -1}, "mem_len=-1 must be at least 0"),
        (ModelConfig, {"attn_len": 0}, "attn_len=0 must be above 0"),
        (ModelConfig, {"clamp_len": -1}, "clamp_len=-1 .* None for no clamping"),
        (ModelConfig, {"vocab_size": -1}, "vocab_size=-1 must be at least 0"),
        (ModelConfig, {"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
        (ModelConfig, {"attn_dropout": -0.1}, "attn_dropout=-0.1 must be"),
        (ModelConfig, {"norm_eps": 0.0}, "norm_eps=0.0 must be above 0"),
        (DataConfig, {"vocab_size": 0}, "vocab_size=0 must be above 0"),
        (DataConfig, {"valid_fraction": 1.0}, "valid_fraction=1.0 must be"),
        (DataConfig, {"valid_fraction": 0.5, "test_fraction": 0.5}, "leaves no text to train on"),
        (TrainConfig, {"steps": 0}, "steps=0 must be above 0"),
        (
            TrainConfig,
            {"batch_size": 32, "accumulate": 5},
            "accumulate=5 must divide batch_size=32",
        ),
        (TrainConfig, {"warmup_steps": 11, "steps": 10}, "warmup_steps=11 is more than steps=10"),
        (TrainConfig, {"minutes": 1.0}, "minutes=1.0 needs schedule=constant_cooldown"),
        (
            TrainConfig,
            {"minutes": 1.0, "schedule": "constant_cooldown", "cooldown_fraction": 0.0},
            "cooldown_fraction above 0",
        ),
        (TrainConfig, {"minutes": 0.0, "schedule": "constant_cooldown"}, "minutes=0.0 must be"),
        (TrainConfig, {"beta2": 1.0}, "beta2=1.0 must be at least 0 and below 1"),
        (TrainConfig, {"min_lr_ratio": 1.5}, "min_lr_ratio=1.5 must be between 0 and 1"),
        (TrainConfig, {"clip_norm": -1.0}, "clip_norm=-1.0 must be at least 0"),
        (TrainConfig, {"keep_checkpoints": 0}, "keep_checkpoints=0 must be above 0"),
        (TrainConfig, {"save_every": -1}, "save_every=-1 must be at least 0"),
        (EvalConfig, {"segment_len": 0}, "segment_len=0 must be above 0"),
        (EvalConfig, {"mem_len": -1}, "mem_len=-1 must be at least 0"),
        (EvalConfig, {"mem_lens": (0, -5)}, "mem_lens holds -5"),
        (EvalConfig, {"batch_size": 0}, "batch_size=0 must be above 0"),
        (GenerateConfig, {"length": -1}, "length=-1 must be at least 0"),
        (GenerateConfig, {"temperature": -1.0}, "temperature=-1.0 must be at least 0"),
        (GenerateConfig, {"top_k": 0}, "top_k=0 must be above 0"),
        (GenerateConfig, {"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        (GenerateConfig, {"top_p": 1.1}, "top_p=1.1 must be"),
    ],
)
def test_a_wrong_value_is_named_with_its_rule(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        kind(**settings)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (ModelConfig, {"mem_len": 0, "clamp_len": 0, "attn_len": 1, "vocab_size": 0}),
        (DataConfig, {"valid_fraction": 0.0, "test_fraction": 0.0}),
        (TrainConfig, {"warmup_steps": 10, "steps": 10, "eval_every": 0, "save_every": 0}),
        (TrainConfig, {"minutes": 1.0, "schedule": "constant_cooldown", "clip_norm": 0.0}),
        (EvalConfig, {"mem_len": 0, "mem_lens": (0,)}),
        (GenerateConfig, {"length": 0, "temperature": 0.0, "top_p": 1.0, "top_k": 1}),
    ],
)
def test_a_value_on_the_border_is_allowed(kind, settings):
    config = kind(**settings)
    assert {name: getattr(config, name) for name in settings} == settings


def test_widths_follow_from_the_model_width_unless_given():
    config = ModelConfig(d_model=12, n_head=3)
    assert (config.head_width, config.embed_width) == (4, 12)
    config = ModelConfig(d_model=12, n_head=5, d_head=7, d_embed=8)
    assert (config.head_width, config.embed_width) == (7, 8)


@pytest.mark.parametrize("kind", SECTIONS)
def test_settings_do_not_change(kind):
    config = kind()
    for field in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, None)


@pytest.mark.parametrize("kind", SECTIONS)
def test_a_setting_that_may_be_none_is_none_by_default(kind):
    # A recipe file has no word for None: what it leaves out is the default.
    for field in dataclasses.fields(kind):
        may_be_none = types.NoneType in typing.get_args(field.type)
        assert (field.default is None) == may_be_none, field.name


def test_a_recipe_needs_a_model_and_a_text():
    with pytest.raises(TypeError, match="model"):
        Config(data=DataConfig())
    with pytest.raises(TypeError, match="data"):
        Config(model=ModelConfig())
    assert Config(model=ModelConfig(), data=DataConfig()).train == TrainConfig()
