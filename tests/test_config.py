"""Settings that cannot work are refused where they are written, with the rule they break."""

import dataclasses
import types
import typing

import pytest

from transformer_xl.cli import parse
from transformer_xl.config import (
    Config,
    DataConfig,
    EvalConfig,
    GenerateConfig,
    ModelConfig,
    TrainConfig,
)
from transformer_xl.config.knn import KnnConfig
from transformer_xl.config.recipes import dump_recipe, parse_recipe

ADAPTIVE = {
    "cutoffs": (5, 9),
    "tie_projections": (True, False, False),
    "div_val": 2,
    "proj_same_dim": False,
}
SECTIONS = (ModelConfig, DataConfig, TrainConfig, EvalConfig, GenerateConfig)


WRONG = [
    (ModelConfig, {"n_head": 7}, "n_head=7 must divide d_model=512; .* set d_head"),
    (ModelConfig, {"d_model": 7, "n_head": 7}, "d_model=7 must be even"),
    (ModelConfig, {"n_layer": 0}, "n_layer=0 must be above 0"),
    (ModelConfig, {"d_head": 0}, "d_head=0 must be above 0"),
    (ModelConfig, {"d_embed": -1}, "d_embed=-1 must be above 0"),
    (ModelConfig, {"mem_len": -1}, "mem_len=-1 must be at least 0"),
    (ModelConfig, {"attn_len": 0}, "attn_len=0 must be above 0"),
    (ModelConfig, {"clamp_len": -1}, "model.clamp_len=-1 must be at least 0"),
    (ModelConfig, {"vocab_size": -1}, "vocab_size=-1 must be at least 0"),
    (ModelConfig, {"dropout": 1.0}, "dropout=1.0 must be below 1"),
    (ModelConfig, {"attn_dropout": -0.1}, "attn_dropout=-0.1 must be"),
    (ModelConfig, {"norm_eps": 0.0}, "norm_eps=0.0 must be above 0"),
    (ModelConfig, {"ext_len": -1}, "ext_len=-1 must be at least 0"),
    (ModelConfig, {"sample_softmax": -1}, "sample_softmax=-1 must be at least 0"),
    (ModelConfig, {"div_val": 0}, "div_val=0 must be above 0"),
    (ModelConfig, {"cutoffs": (5, 5)}, r"cutoffs=\(5, 5\) must rise from above 0"),
    (ModelConfig, {"cutoffs": (9, 5)}, r"cutoffs=\(9, 5\) must rise"),
    (
        ModelConfig,
        {"cutoffs": (0, 5)},
        r"cutoffs\[0\]=0 must be above 0",
    ),
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
    (ModelConfig, {"attn_type": 1, "n_positions": 0}, "n_positions=0 must be above 0"),
    (ModelConfig, {"d_model": 7, "n_head": 7, "attn_type": 2}, "d_model=7 must be even"),
    (EvalConfig, {"ext_len": -1}, "ext_len=-1 must be at least 0"),
    (DataConfig, {"vocab_size": 0}, "vocab_size=0 must be above 0"),
    (DataConfig, {"valid_fraction": 1.0}, "valid_fraction=1.0 must be"),
    (DataConfig, {"valid_fraction": 0.5, "test_fraction": 0.5}, "leaves no text to train on"),
    (TrainConfig, {"steps": 0}, "steps=0 must be above 0"),
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
    (TrainConfig, {"minutes": 0.0, "schedule": "constant_cooldown"}, "minutes=0.0 must be"),
    (
        TrainConfig,
        {"average": "ema", "average_start": 1.0},
        "average='ema' has no effect with average_start=1: averaging begins after the last",
    ),
    (TrainConfig, {"beta2": 1.0}, "beta2=1.0 must be below 1"),
    (TrainConfig, {"min_lr_ratio": 1.5}, "min_lr_ratio=1.5 must be at most 1"),
    (TrainConfig, {"reset_memory": 1.0}, "reset_memory=1.0 must be below 1"),
    (TrainConfig, {"average_start": 1.5}, "average_start=1.5 must be at most 1"),
    (TrainConfig, {"average_decay": 1.0}, "average_decay=1.0 must be below 1"),
    (TrainConfig, {"activation_reg": -1.0}, "activation_reg=-1.0 must be at least 0"),
    (TrainConfig, {"embedding_lr": 0.0}, "embedding_lr=0.0 must be above 0"),
    (TrainConfig, {"stages": ((0.0, 0, 8), (0.5, 8, 8))}, r"stages\[0\]\[1\]=0 must be above 0"),
    (EvalConfig, {"window": 0}, "window=0 must be above 0"),
    (KnnConfig, {"share": 1.0}, "share=1.0 must be below 1"),
    (KnnConfig, {"temperature": 0.0}, "temperature=0.0 must be above 0"),
    (EvalConfig, {"dynamic": "sgd", "dynamic_lr": -1.0}, "dynamic_lr=-1.0 must be at least 0"),
    (TrainConfig, {"clip_norm": -1.0}, "clip_norm=-1.0 must be at least 0"),
    (TrainConfig, {"keep_checkpoints": 0}, "keep_checkpoints=0 must be above 0"),
    (TrainConfig, {"save_every": -1}, "save_every=-1 must be at least 0"),
    (EvalConfig, {"segment_len": 0}, "segment_len=0 must be above 0"),
    (EvalConfig, {"mem_len": -1}, "mem_len=-1 must be at least 0"),
    (
        EvalConfig,
        {"mem_lens": (0, -5)},
        r"mem_lens\[1\]=-5 must be at least 0",
    ),
    (EvalConfig, {"batch_size": 0}, "batch_size=0 must be above 0"),
    (GenerateConfig, {"length": -1}, "length=-1 must be at least 0"),
    (GenerateConfig, {"temperature": -1.0}, "temperature=-1.0 must be at least 0"),
    (GenerateConfig, {"top_k": 0}, "top_k=0 must be above 0"),
    (GenerateConfig, {"top_p": 0.0}, "top_p=0.0 must be above 0"),
    (GenerateConfig, {"top_p": 1.1}, "top_p=1.1 must be"),
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


def test_a_recipe_needs_a_model_and_a_text():
    with pytest.raises(TypeError, match="model"):
        Config(data=DataConfig())
    with pytest.raises(TypeError, match="data"):
        Config(model=ModelConfig())
    assert Config(model=ModelConfig(), data=DataConfig()).train == TrainConfig()


@pytest.mark.parametrize(
    "settings",
    [
        ADAPTIVE,
        {"tie_projections": True, "cutoffs": (5,)},
        {"attn_type": 1, "n_positions": 9, "ext_len": 3},
        {"attn_type": 2, "norm_first": True, "quirks": ("stored_positions", "raw_queries")},
        {"attn_type": 3, "n_positions": 9, "sample_softmax": 8},
        {"ext_len": 4, "quirks": ("swapped_ext_len", "exact_frequencies")},
    ],
    ids=str,
)
def test_a_recipe_with_the_settings_of_old_models_survives_writing_and_reading(settings):
    config = Config(
        model=ModelConfig(**settings),
        data=DataConfig(path="a.txt"),
        train=TrainConfig(loss="half"),
        eval=EvalConfig(ext_len=2),
    )
    again = parse_recipe(dump_recipe(config), "a.toml")
    assert again == config
    assert {name: getattr(again.model, name) for name in settings} == settings


def parsed(*words):
    return parse(["train", "demo", "--out", "nowhere", *words]).config()


def test_settings_of_old_models_may_come_from_the_command_line():
    line = "--model.cutoffs 5 9 --model.div_val 2 --model.proj_same_dim False"
    model = parsed(*line.split(), "--model.tie_projections", "True", "False", "False").model
    assert {name: getattr(model, name) for name in ADAPTIVE} == ADAPTIVE
    line = "--model.attn_type 3 --model.n_positions 40 --model.ext_len 4 --train.loss half"
    line += " --train.reset_memory 0"
    command = parsed(*line.split(), "--eval.ext_len", "2", "--model.quirks", "stored_positions")
    assert (command.model.attn_type, command.model.n_positions) == (3, 40)
    assert (command.model.ext_len, command.eval.ext_len) == (4, 2)
    assert command.model.quirks == ("stored_positions",)
    assert command.train.loss == "half"


@pytest.mark.parametrize("answer", [True, False])
def test_one_answer_may_stand_for_all_projections(answer):
    assert parsed("--model.tie_projections", str(answer)).model.tie_projections is answer


@pytest.mark.parametrize(
    "words",
    [
        ["--model.attn_type", "4"],
        ["--model.quirks", "wings"],
        ["--model.cutoffs", "9", "5"],
        ["--train.loss", "quarter"],
    ],
    ids=str,
)
def test_a_wrong_setting_on_the_command_line_ends_it(words, capsys):
    with pytest.raises((SystemExit, ValueError)):
        parsed(*words)
