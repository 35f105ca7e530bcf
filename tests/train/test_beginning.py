"""How a run begins: from weights that are drawn, or those of a model."""

import shutil
from dataclasses import replace

import pytest
import torch

from transformer_xl.cli import parse
from transformer_xl.config import DataConfig
from transformer_xl.config.distributed import World
from transformer_xl.data import prepare
from transformer_xl.model import load_model
from transformer_xl.train import Interrupted, train
from transformer_xl.train.beginning import (
    fit_to_corpus,
    initial_weights,
    new_state,
    require_vocabulary,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, toy_recipe):
    folder = tmp_path_factory.mktemp("first") / "run"
    train(toy_recipe(train={"steps": 4}), folder, quiet=True)
    return folder


@pytest.fixture
def other_text(tmp_path, toy_text):
    """Another text of the same characters."""
    path = tmp_path / "other.txt"
    lines = toy_text.read_text().splitlines(keepends=True)
    path.write_text("".join(reversed(lines)))
    return path


@pytest.fixture
def going_on(toy_recipe, trained, other_text):
    """Makes recipes that begin with the model of the first run."""
    data = DataConfig(path=str(other_text), tokenizer=str(trained / "model" / "best"))

    def make(model=None, data=data, **settings):
        recipe = toy_recipe(model=model or {}, train={"init_from": str(trained), **settings})
        return replace(recipe, data=data)

    return make


@pytest.fixture
def tuned():
    """Make the state of a training that begins with the weights of a model."""

    def begin(recipe):
        weights = initial_weights(recipe)
        corpus = prepare(recipe.data)
        require_vocabulary(recipe, corpus)
        config = fit_to_corpus(recipe, corpus)
        return new_state(config, corpus, torch.device("cpu"), World(), weights)

    return begin


def test_a_run_goes_on_without_the_model_that_it_began_with(
    tmp_path, trained, other_text, toy_recipe, interrupted_at
):
    source = tmp_path / "source"
    shutil.copytree(trained / "model" / "best", source)
    data = DataConfig(path=str(other_text), tokenizer=str(source))
    recipe = replace(toy_recipe(train={"init_from": str(source)}), data=data)
    interrupted_at(4)
    with pytest.raises(Interrupted):
        train(recipe, tmp_path / "run", quiet=True)
    source.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"--data\.tokenizer RUN/model/last"):
        train(recipe, tmp_path / "run", quiet=True)
    data = replace(data, tokenizer=str(tmp_path / "run" / "model" / "last"))
    train(replace(recipe, data=data), tmp_path / "run", quiet=True)
    assert (tmp_path / "run" / "results.json").is_file()


def test_training_begins_with_the_weights_of_the_model(trained, going_on, tuned):
    state = tuned(going_on(average="ema"))
    known = dict(load_model(trained).named_parameters())
    for name, weight in state.model.named_parameters():
        assert torch.equal(weight, known[name]), name
    for name, weight in state.average.module.named_parameters():
        assert torch.equal(weight, known[name]), name


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_layer": 3}, r"another network than the recipe: n_layer=3 and 2\."),
        ({"norm_first": True, "activation": "gelu"}, r"activation='gelu' and 'relu', norm_first="),
    ],
)
def test_another_network_is_refused(going_on, tuned, changed, message):
    with pytest.raises(ValueError, match=message):
        tuned(going_on(model=changed))


def test_another_vocabulary_is_refused_with_the_remedy(going_on, tuned, other_text, trained):
    data = DataConfig(path=str(other_text), vocab="bytes")
    where = trained / "model" / "best"
    with pytest.raises(ValueError, match=rf"another vocabulary .*--data\.tokenizer {where}$"):
        tuned(going_on(data=data))


def test_the_command_takes_a_model_in_place_of_a_recipe(tmp_path, trained, other_text):
    for part in ("model/best", ""):
        words = ["train", str(trained / part), "--out", str(tmp_path / "second")]
        command = parse([*words, "--data.path", str(other_text), "--train.steps", "2"])
        config = command.config()
        assert config.model == load_model(trained).config
        assert config.train.init_from == str(trained / "model" / "best") == config.data.tokenizer
        assert config.train.lr == 1e-2, "as the run that made the model"
        assert config.data.path == str(other_text)
    assert command.run() is None
    assert (tmp_path / "second" / "report.html").is_file()
