"""Options of the network beside the paper's: what they default to and what they refuse."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from transformer_xl.config import (
    AuthorsConfig,
    Config,
    DataConfig,
    GPTConfig,
    LSTMConfig,
    ModelConfig,
    TransformerXLConfig,
)
from transformer_xl.config.checks import UnusedError, read_settings
from transformer_xl.config.model import KINDS
from transformer_xl.config.recipes import load_recipe
from transformer_xl.errors import SettingsError
from transformer_xl.model.pretrained import ModelFolder

OPTIONS = {
    "kind": "transformer_xl",
    "norm": "layer",
    "activation": "relu",
    "qk_norm": False,
    "key_offset": False,
    "scalable_softmax": None,
    "input_recurrence": False,
    "embedding_residual": False,
    "layer_attn_lens": (),
    "enhanced_recurrence": False,
    "qkv_dropout": 0.0,
    "embed_dropout": 0.0,
    "input_dropout": None,
    "ff_dropout": None,
    "output_dropout": None,
    "variational_dropout": False,
}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"embedding_residual": True, "n_layer": 1}, "embedding_residual=True with n_layer=1"),
        (
            {"key_offset": True, "enhanced_recurrence": True},
            "key_offset=True with enhanced_recurrence=True: .*; choose one",
        ),
        (
            {"input_recurrence": True, "enhanced_recurrence": True},
            "input_recurrence=True with enhanced_recurrence=True: .*; choose one",
        ),
        (
            {"input_recurrence": True, "attn_type": 2, "quirks": ("stored_positions",)},
            "input_recurrence=True with the quirk stored_positions",
        ),
        (
            {"enhanced_recurrence": True, "attn_type": 2},
            "enhanced_recurrence=True with attn_type=2: absolute positions .* use attn_type 0 or 1",
        ),
        (
            {"enhanced_recurrence": True, "attn_type": 3, "n_positions": 9},
            "enhanced_recurrence=True with attn_type=3",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_rule(settings, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**settings)


def test_a_kind_has_a_class_with_its_own_settings():
    for kind, cls in KINDS.items():
        config = ModelConfig(kind=kind)
        assert type(config) is cls
        assert type(replace(config, kind="gpt")) is GPTConfig
        assert ModelConfig(**asdict(config)) == config
    # A setting of another kind may be stored at its default, and has no effect otherwise.
    assert ModelConfig(kind="lstm", n_head=8) == LSTMConfig()
    with pytest.raises(UnusedError, match="n_head=4 has no effect with kind='lstm', which has no"):
        ModelConfig(kind="lstm", n_head=4)
    authors = TransformerXLConfig(start_memory="zeros")
    assert type(authors) is AuthorsConfig
    assert replace(authors, start_memory="empty") == TransformerXLConfig()


@pytest.mark.parametrize("kind", ["gtp", "unheard_of", ["x"]])
def test_an_unknown_kind_is_named_before_settings_of_a_kind(kind):
    with pytest.raises(SettingsError, match=r"model\.kind=.* is unknown; choose from"):
        ModelConfig(kind=kind, n_head=2, ff_dropout=0.1)


def test_what_belonged_to_kinds_that_are_gone_is_ignored_or_named():
    stored = {"state_size": 128, "expand": 2, "conv_width": 4, "weight_dropout": 0.0}
    stored |= {"value_residual": False}
    for config in (read_settings(ModelConfig, stored, "f", "model"), ModelConfig(**stored)):
        assert config == ModelConfig()
    with pytest.raises(SettingsError, match=r"model\.expand=3 is gone: revision 47b3a2d"):
        ModelConfig(expand=3)
    for kind in ("mamba2", "rwkv", "xlnet", "xlstm"):
        message = f"'{kind}' is gone; there are 'transformer_xl', 'lstm', 'gpt'.*; revision 47b3a2d"
        with pytest.raises(SettingsError, match=message):
            read_settings(ModelConfig, stored | {"kind": kind}, "f", "model")
        with pytest.raises(SettingsError, match=f"recipe compare-{kind} is gone: .* 47b3a2d"):
            load_recipe(f"compare-{kind}")


def test_value_residuals_are_gone_wherever_a_model_is_described(tmp_path):
    gone, off = {"value_residual": True}, {"value_residual": False}
    message = r"model\.value_residual=True is gone: revision 47b3a2d of transformer_xl has it"
    with pytest.raises(SettingsError, match=message):
        ModelConfig(**gone)
    recipe, settings = tmp_path / "recipe.toml", tmp_path / "config.json"
    about = {"model_type": "transformer-xl", "format_version": 1, "vocab_size": 9}
    recipe.write_text('[data]\npath = "a"\n[model]\nvalue_residual = true\n')
    settings.write_text(json.dumps(about | gone))
    for is_stored in (False, True):
        with pytest.raises(SettingsError, match=f"{recipe}: {message}"):
            load_recipe(recipe, is_stored=is_stored)
    with pytest.raises(SettingsError, match=f"{settings}: {message}"):
        ModelFolder(tmp_path).read_config()
    recipe.write_text(recipe.read_text().replace("true", "false"))
    settings.write_text(json.dumps(about | off))
    assert load_recipe(recipe).model == ModelConfig()
    assert ModelFolder(tmp_path).read_config() == ModelConfig(vocab_size=9)


def test_settings_of_another_kind_may_be_arrays():
    with pytest.raises(UnusedError, match=r"layer_attn_lens=.* has no effect with kind='lstm'"):
        ModelConfig(kind="lstm", layer_attn_lens=np.array([1, 2]))


def test_recipes_differ_in_what_they_say_and_not_in_what_a_kind_lacks():
    one, other = (
        Config(model=ModelConfig(start_memory=start), data=DataConfig(path="a"))
        for start in ("empty", "zeros")
    )
    assert one.differences(other) == ["model.start_memory: 'empty', 'zeros'"]


def test_an_older_file_of_settings_is_the_papers_network(tmp_path):
    path, config = tmp_path / "config.json", ModelConfig(vocab_size=9)
    old = {name: value for name, value in asdict(config).items() if name not in OPTIONS}
    path.write_text(json.dumps({"model_type": "transformer-xl", "format_version": 1, **old}))
    assert ModelFolder(path.parent).read_config() == config
    assert {name: getattr(config, name) for name in OPTIONS} == OPTIONS


def test_places_of_dropout_take_the_common_share_where_they_have_none():
    config = ModelConfig(dropout=0.3, ff_dropout=0.0, output_dropout=0.5)
    assert config.dropouts == (0.3, 0.0, 0.5)
    assert config.dropouts.input == 0.3
