"""The published models are known by their widths and measured as they were measured."""

import pytest

from transformer_xl.config import ModelConfig
from transformer_xl.config.presets import NO_LIMIT, PRESETS, preset_eval, recognize

# Segment, memory, largest distance: reference section 3.3 of the authors' scripts.
LENGTHS = {
    "enwik8-base": (80, 2100, 820),
    "enwik8-large": (128, 3800, 1000),
    "text8-base": (80, 2100, 820),
    "text8-large": (128, 3800, 1000),
    "wt103-base": (64, 640, 400),
    "wt103-base-nvidia": (64, 640, 400),
    "wt103-large": (128, 1600, 1000),
    "lm1b-base": (32, 128, NO_LIMIT),
    "lm1b-large": (32, 128, NO_LIMIT),
}
WIDTHS = {
    "enwik8-base": (12, 8, 512, 2048, 204),
    "enwik8-large": (24, 8, 1024, 3072, 204),
    "text8-base": (12, 8, 512, 2048, 27),
    "text8-large": (24, 8, 1024, 3072, 27),
    "wt103-base": (16, 10, 410, 2100, 267_735),
    "wt103-base-nvidia": (16, 8, 512, 2048, 267_736),
    "wt103-large": (18, 16, 1024, 4096, 267_735),
    "lm1b-base": (18, 8, 1024, 4096, 793_471),
    "lm1b-large": (24, 16, 1280, 8192, 793_471),
}


def config(name, **changes):
    names = ("n_layer", "n_head", "d_model", "d_inner", "vocab_size")
    return ModelConfig(**dict(zip(names, WIDTHS[name], strict=True)) | changes)


def test_every_preset_has_its_line_here():
    assert PRESETS.keys() == LENGTHS.keys() == WIDTHS.keys()


def test_a_published_model_is_recognized_by_its_widths():
    for name in PRESETS:
        assert recognize(config(name)) == name
        assert recognize(config(name, mem_len=3, tie_biases=False, quirks=())) == name


def test_another_model_is_none_of_them():
    for name in PRESETS:
        for changes in ({"n_layer": 3}, {"d_inner": 99}, {"vocab_size": 5000}):
            assert recognize(config(name, **changes)) is None, (name, changes)
    table = {"n_positions": 9}
    for changes in ({"attn_type": 1} | table, {"attn_type": 2}, {"attn_type": 3} | table):
        assert recognize(config("enwik8-base", **changes)) is None, changes


def test_the_vocabulary_tells_models_of_the_same_widths_apart():
    large = {"vocab_size": 793_471}
    assert recognize(config("wt103-large", **large)) == "lm1b-base"
    assert recognize(config("enwik8-base", vocab_size=27)) == "text8-base"


def test_a_preset_has_the_lengths_of_the_scripts():
    for name in PRESETS:
        for n_beyond in (0, 1):
            settings = preset_eval(name, keys_beyond_memory=n_beyond)
            found = (settings.segment_len, settings.mem_len, settings.clamp_len)
            assert found == LENGTHS[name], name
            assert settings.attn_len == settings.mem_len + n_beyond, (name, n_beyond)
            assert (settings.split, settings.ext_len) == ("test", None), name


def test_as_in_the_pytorch_code_no_key_lies_beyond_the_memory_by_default():
    assert preset_eval("enwik8-base").attn_len == 2100


def test_an_unknown_preset_is_named_with_those_there_are():
    with pytest.raises(ValueError, match="'wt2' is no preset; there are enwik8-base, enwik8-large"):
        preset_eval("wt2")
