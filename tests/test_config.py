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
from transformer_xl.config.recipes import parse_recipe

SECTIONS = (ModelConfig, DataConfig, TrainConfig, EvalConfig, GenerateConfig)


WRONG = [
    (ModelConfig, {"n_head": 7}, "n_head=7 must divide d_model=512; .* set d_head"),
    (ModelConfig, {"d_model": 7, "n_head": 7}, "d_model=7 must be even"),
    (ModelConfig, {"cutoffs": (5, 5)}, r"cutoffs=\(5, 5\) must rise from above 0"),
    (ModelConfig, {"cutoffs": (9, 5)}, r"cutoffs=\(9, 5\) must rise"),
    (ModelConfig, {"cutoffs": (5, 9), "vocab_size": 9}, "must rise .* to below vocab_size=9"),
    (
        ModelConfig,
        {"cutoffs": (5, 9), "div_val": 4, "d_embed": 15},
        "div_val=4 leaves nothing of d_embed=15 for the last of 3 clusters",
    ),
    (
        ModelConfig,
        {"cutoffs": (5, 9), "tie_projections": (True, False)},
        r"tie_projections=\(True, False\) must be one answer, or one for each of the 3 "
        r"clusters that cutoffs=\(5, 9\) make",
    ),
    (
        ModelConfig,
        {"tie_projections": ()},
        r"tie_projections=\(\) must be .* of the 1 clusters",
    ),
    (
        ModelConfig,
        {"attn_type": 1},
        "attn_type=1 with n_positions=None: attn_type 1 and 3 need",
    ),
    (ModelConfig, {"attn_type": 3}, "attn_type=3 with n_positions=None"),
    (ModelConfig, {"n_positions": 9}, "attn_type=0 with n_positions=9: .* have no table"),
    (ModelConfig, {"attn_type": 2, "n_positions": 9}, "attn_type=2 with n_positions=9"),
    (ModelConfig, {"d_model": 7, "n_head": 7, "attn_type": 2}, "d_model=7 must be even"),
    (DataConfig, {"valid_fraction": 0.5, "test_fraction": 0.5}, "leaves no text to train on"),
    (
        TrainConfig,
        {"batch_size": 32, "accumulate": 5},
        "accumulate=5 must divide batch_size=32",
    ),
    (
        TrainConfig,
        {"warmup_steps": 11, "steps": 10},
        "more than steps=10: lower warmup_steps or raise",
    ),
    (TrainConfig, {"minutes": 1.0}, "minutes=1.0 needs schedule=constant_cooldown"),
    (
        TrainConfig,
        {"minutes": 1.0, "schedule": "constant_cooldown", "cooldown_fraction": 0.0},
        "cooldown_fraction above 0",
    ),
    (
        TrainConfig,
        {"average": "ema", "average_start": 1.0},
        "average='ema' has no effect with average_start=1: averaging begins after the last",
    ),
]


def test_a_wrong_value_is_named_with_its_rule():
    for kind, settings, message in WRONG:
        with pytest.raises(ValueError, match=message):
            kind(**settings)


ON_THE_BORDER = [
    (ModelConfig, {"mem_len": 0, "clamp_len": 0, "attn_len": 1, "vocab_size": 0}),
    (DataConfig, {"valid_fraction": 0.0, "test_fraction": 0.0}),
    (TrainConfig, {"warmup_steps": 10, "steps": 10, "eval_every": 0, "save_every": 0}),
    (TrainConfig, {"minutes": 1.0, "schedule": "constant_cooldown", "clip_norm": 0.0}),
    (ModelConfig, {"cutoffs": (1, 2), "vocab_size": 3, "div_val": 16, "d_embed": 256}),
    (ModelConfig, {"cutoffs": (5,), "tie_projections": (False, True), "vocab_size": 0}),
    (ModelConfig, {"attn_type": 1, "n_positions": 1, "d_model": 7, "n_head": 7}),
    (ModelConfig, {"attn_type": 3, "n_positions": 1, "ext_len": 0, "sample_softmax": 0}),
    (EvalConfig, {"mem_len": 0, "mem_lens": (0,), "ext_len": 0}),
    (GenerateConfig, {"length": 0, "temperature": 0.0, "top_p": 1.0, "top_k": 1}),
]


def test_a_value_on_the_border_is_allowed():
    for kind, settings in ON_THE_BORDER:
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


def test_a_setting_that_is_gone_is_ignored_where_it_changed_nothing():
    recipe = Config(model=ModelConfig(), data=DataConfig(path="mine.txt"))
    text = recipe.to_toml()
    gone = "skip_norm = 0.0\nspike = 3.0\npatience = 2\ndecay_rate = 0.5\n"
    assert parse_recipe(text.replace("[train]\n", f"[train]\n{gone}"), "mine") == recipe
    with pytest.raises(ValueError, match=r"mine: train\.skip_norm=5\.0 is gone: .*; leave it out"):
        parse_recipe(text.replace("[train]\n", "[train]\nskip_norm = 5.0\n"), "mine")
