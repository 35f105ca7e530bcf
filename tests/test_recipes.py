"""Recipes are read as they were written, and what is wrong with one is said where it is."""

import dataclasses

import pytest
import torch

from transformer_xl.cli.runs import Recipes
from transformer_xl.config import (
    Config,
    DataConfig,
    EvalConfig,
    GenerateConfig,
    ModelConfig,
    TrainConfig,
)
from transformer_xl.config.recipes import (
    load_recipe,
    parse_recipe,
    recipe_names,
    recipe_text,
)
from transformer_xl.model import build_model

SMALL = "[model]\nn_layer = 2\n[data]\npath = 'a.txt'\n"


def test_a_recipe_that_is_written_is_read_back():
    config = Config(
        model=ModelConfig(n_layer=3, d_model=64, n_head=3, d_head=20, clamp_len=0, norm_first=True),
        data=DataConfig(path="C:\\text \"ö\" \n 'x'", vocab="words", valid_fraction=0.1),
        train=TrainConfig(lr=1 / 3, minutes=0.1, schedule="constant_cooldown"),
        eval=EvalConfig(mem_lens=(0, 1, 2), mem_len=0),
        generate=GenerateConfig(prompt='\n\t"""\\', temperature=1e-9),
    )
    assert parse_recipe(config.to_toml(), "a.toml") == config


def test_a_shipped_recipe_survives_writing_and_reading():
    for name in recipe_names():
        config = load_recipe(name)
        assert parse_recipe(config.to_toml(), name) == config, name


WRONG = [
    ("[model\n", "a.toml is not valid TOML: .*line 1"),
    (f"a = {'[' * 9999}", "a.toml is not valid TOML: it is nested too deeply"),
    (f"a = {'{a=' * 9999}", "a.toml is not valid TOML: it is nested too deeply"),
    (f"a = {'9' * 9999}", "a.toml is not valid TOML: .*digits"),
    ("", "a.toml: .*the section \\[model\\] is missing"),
    ("[model]\n", "a.toml: .*the section \\[data\\] is missing"),
    ("[modle]\nn_layer = 2\n", "a.toml: modle: no such setting; did you mean model"),
    ("[xyz]\n", "a.toml: xyz: no such setting; there are model, data, train, eval, generate"),
    (SMALL + "[train]\nqqq = 1\n", "train.qqq: no such setting; there are"),
    (SMALL + "[train]\nstep = 1\n", "train.step: no such setting; did you mean steps"),
    ("model = 3\n", r"a.toml: model is a section: write \[model\]"),
    ("[[model]]\n", r"a.toml: model is a section: write \[model\]"),
    ("[model]\nn_head = 7\n[data]\n", "a.toml: model: n_head=7 must divide d_model=512"),
    (SMALL + "[train]\nsteps = 0\n", "a.toml: train.steps=0 must be above 0"),
]


def test_what_is_wrong_is_named_with_file_key_and_rule():
    for text, message in WRONG:
        with pytest.raises(ValueError, match=message):
            parse_recipe(text, "a.toml")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the recipe file .*b\.toml does not exist"):
        load_recipe(tmp_path / "b.toml")


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(
        ValueError, match="no recipe and no file is called 'dmeo'; did you mean demo"
    ):
        load_recipe("dmeo")
    with pytest.raises(ValueError, match="'xyzzy'; `txl recipes` lists"):
        recipe_text("xyzzy")


def test_differences_name_the_settings_and_both_values():
    one = parse_recipe(SMALL, "")
    other = dataclasses.replace(
        one,
        model=dataclasses.replace(one.model, n_layer=3),
        train=dataclasses.replace(one.train, seed=2, lr=0.1),
    )
    assert one.differences(one) == []
    assert one.differences(other) == [
        "model.n_layer: 2, 3",
        "train.lr: 0.00025, 0.1",
        "train.seed: 1, 2",
    ]


PAPER = [name for name in recipe_names() if name.startswith("paper-")]
PARAMETERS = {
    # Vocabulary and weights of the models that the official scripts make.
    "paper-enwik8-base": (204, 41_055_436),
    "paper-enwik8-base-tensorflow": (204, 41_055_436),
    "paper-enwik8-large": (204, 277_231_820),
    "paper-enwik8-large-tensorflow": (204, 277_231_820),
    "paper-text8-base": (27, 40_964_635),
    "paper-text8-base-tensorflow": (27, 40_964_635),
    "paper-text8-large": (27, 277_050_395),
    "paper-text8-large-tensorflow": (27, 277_050_395),
    "paper-wt103-base": (267_735, 151_107_538),
    "paper-wt103-base-tensorflow": (267_735, 151_119_838),
    # The same with fairseq's own vocabulary: what its program prints.
    "paper-wt103-base-tensorflow, fairseq": (267_744, 151_123_537),
    "paper-wt103-large": (267_735, 285_170_506),
    "paper-wt103-large-tensorflow": (267_735, 285_205_322),
    "paper-wt103-base-nvidia": (267_735, 191_950_298),
    "paper-wt103-base-nvidia-tensorflow": (267_735, 191_965_658),
}


def n_parameters(name, vocab_size):
    config = dataclasses.replace(load_recipe(name).model, vocab_size=vocab_size)
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(config).parameters())


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_recipe_of_an_official_run_makes_a_model_of_its_size(name):
    vocab_size, expected = PARAMETERS[name]
    assert n_parameters(name.split(",")[0], vocab_size) == expected


@pytest.mark.parametrize(("name", "millions"), [("base", 357.8), ("large", 841.3)])
def test_the_models_of_one_billion_word_have_the_size_that_is_known_roughly(name, millions):
    assert n_parameters(f"paper-lm1b-{name}", 793_471) / 1e6 == pytest.approx(millions, abs=0.1)


# Segment, memory, largest distance: the authors' evaluation scripts.
EVALUATED = {
    "enwik8-base": (80, 2100, 820),
    "enwik8-large": (128, 3800, 1000),
    "text8-base": (80, 2100, 820),
    "text8-large": (128, 3800, 1000),
    "wt103-base": (64, 640, 400),
    "wt103-large": (128, 1600, 1000),
    "lm1b-base": (32, 128, None),
    "lm1b-large": (32, 128, None),
}


def test_a_recipe_of_an_official_run_is_evaluated_as_that_run_was():
    for name in PAPER:
        if name == "paper-ptb-word":
            continue
        _, corpus, size, *others = name.split("-")
        lengths = load_recipe(name).eval
        found = (lengths.segment_len, lengths.mem_len, lengths.clamp_len)
        assert found == EVALUATED[f"{corpus}-{size}"], name
        # Beyond its memory a token sees itself with all but the authors' PyTorch code.
        assert lengths.attn_len == found[1] + bool(others), name


def test_every_official_run_has_its_recipe():
    base_and_large = [
        f"paper-{corpus}-{size}{code}"
        for corpus in ("enwik8", "text8", "wt103", "lm1b")
        for size in ("base", "large")
        for code in ("", "-tensorflow")
    ]
    nvidia = ("base-nvidia", "base-nvidia-tensorflow", "large-nvidia", "large-nvidia-multinode")
    expected = [*base_and_large, *(f"paper-wt103-{name}" for name in nvidia), "paper-ptb-word"]
    assert sorted(expected) == PAPER


def test_a_recipe_of_the_paper_says_what_the_paper_reached():
    for name in PAPER:
        second = recipe_text(name).splitlines()[1]
        assert second.startswith("# Paper: "), name
        assert second.endswith("; not run here."), name


def test_a_laptop_recipe_ends_within_half_an_hour_and_has_a_larger_one_beside_it():
    # Those of an LSTM and a window are compared with the same one.
    larger = tuple(name for name in recipe_names() if not name.endswith("-cpu"))
    for name in recipe_names():
        if name.endswith("-cpu"):
            minutes = load_recipe(name).train.minutes
            assert minutes is not None, name
            assert minutes <= 28, name
            assert name.startswith(larger), name


def test_a_copy_reads_any_text_where_the_recipe_reads_the_characters_of_one(tmp_path):
    for name in recipe_names():
        path = tmp_path / f"{name}.toml"
        Recipes(name=name, copy=path).run()
        recipe, copy = load_recipe(name), load_recipe(path)
        if recipe.data.vocab == "chars":
            data = dataclasses.replace(recipe.data, vocab="bytes")
            assert copy == dataclasses.replace(recipe, data=data), name
        else:
            assert path.read_text("utf-8") == recipe_text(name), name
