"""How a run begins: from weights that are drawn, or those of a model."""

from dataclasses import replace

import pytest
import torch

from transformer_xl.cli import parse
from transformer_xl.config import DataConfig
from transformer_xl.data import prepare
from transformer_xl.distributed import World
from transformer_xl.evaluate import evaluate
from transformer_xl.nn import load_model
from transformer_xl.train import train
from transformer_xl.train.beginning import fit_to_corpus, new_state

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, toy_recipe):
    folder = tmp_path_factory.mktemp("first") / "run"
    train(toy_recipe(), folder, quiet=True)
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


def begun(config):
    corpus = prepare(config.data)
    config = fit_to_corpus(config, corpus)
    return new_state(config, corpus, CPU, World())


def test_training_begins_with_the_weights_of_the_model(trained, going_on):
    state = begun(going_on(average="ema"))
    known = dict(load_model(trained).named_parameters())
    for name, weight in state.model.named_parameters():
        assert torch.equal(weight, known[name]), name
    for name, weight in state.average.module.named_parameters():
        assert torch.equal(weight, known[name]), name


def test_what_may_change_between_two_trainings(going_on):
    changed = {"mem_len": 4, "dropout": 0.3, "clamp_len": 6, "variational_dropout": True}
    assert begun(going_on(model=changed)).model.config.mem_len == 4


def test_a_run_that_hardly_moves_ends_where_the_model_was(tmp_path, trained, going_on):
    config = going_on(steps=1, lr=1e-30)
    found = train(config, tmp_path / "second", quiet=True)["test"]["nll"]
    test = prepare(config.data).split("test")
    before = evaluate(load_model(trained), test, segment_len=64, batch_size=1)
    assert found == pytest.approx(before.nll, rel=1e-3)
    assert "init_from" in (tmp_path / "second" / "recipe.toml").read_text()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_layer": 3}, r"another network than the recipe: n_layer=3 and 2\."),
        ({"norm_first": True, "activation": "gelu"}, r"activation='gelu' and 'relu', norm_first="),
    ],
)
def test_another_network_is_refused(going_on, changed, message):
    with pytest.raises(ValueError, match=message):
        begun(going_on(model=changed))


def test_another_vocabulary_is_refused_with_the_remedy(going_on, other_text, trained):
    data = DataConfig(path=str(other_text), vocab="bytes")
    where = trained / "model" / "best"
    with pytest.raises(ValueError, match=rf"another vocabulary .*--data\.tokenizer {where}$"):
        begun(going_on(data=data))


def test_a_model_that_is_not_there_is_named_before_anything_is_written(tmp_path, going_on):
    config = going_on(init_from=str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        train(config, tmp_path / "second", quiet=True)
    assert not (tmp_path / "second" / "recipe.toml").exists()


@pytest.mark.parametrize("part", ["", "model/best"])
def test_the_command_takes_a_model_in_place_of_a_recipe(tmp_path, trained, other_text, part):
    words = ["train", str(trained / part), "--out", str(tmp_path / "second")]
    command = parse([*words, "--data.path", str(other_text), "--train.steps", "2"])
    assert command.model == load_model(trained).config
    assert command.train.init_from == str(trained / "model" / "best") == command.data.tokenizer
    assert command.train.lr == 1e-2, "as the run that made the model"
    assert command.data.vocab == DataConfig().vocab
    assert command.run() is None
    assert (tmp_path / "second" / "report.html").is_file()
