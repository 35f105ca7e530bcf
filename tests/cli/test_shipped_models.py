"""Commands take the name of a model that comes with the package, and say which one they took."""

import shutil

import pytest

import transformer_xl as txl_package
from transformer_xl.config.recipes import load_recipe

pytestmark = pytest.mark.usefixtures("one_thread", "shipped")
TOY = "using the shipped model toy (version 1)"


def test_the_list_says_what_there_is(txl, shipped):
    code, out, err = txl("models")
    assert (code, err) == (0, "")
    listed = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert [*listed] == ["notes", "toy"]
    assert listed["toy"].startswith("writes like toy (")
    assert listed["toy"].endswith(" M parameters; 8 bits per byte on nothing)")
    found = txl("models", "--json").json
    assert [*found] == ["notes", "toy"]
    assert found["toy"]["folder"] == str(shipped / "toy-1")
    assert found["toy"] == txl("models", "toy", "--json").json
    assert found["toy"]["metrics"] == {"bits per byte on nothing": 8.0}


def test_a_card_is_shown_as_it_is(txl, shipped):
    code, out, _ = txl("models", "notes-1")
    assert (code, out) == (0, (shipped / "notes-1" / "README.md").read_text())


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "toy", "--length", "3"],
        ["eval", "toy", "--file", "text.txt"],
        ["score", "toy", "text.txt"],
        ["doctor", "toy"],
        # What traces a model cannot see through the check of shapes.
        pytest.param(["export", "toy", "out", "--format", "torch"], marks=pytest.mark.compile),
        [
            *("recl", "toy", "--file", "text.txt", "--recl.step", "5"),
            *("--recl.longest", "15", "--recl.tokens", "20"),
        ],
    ],
    ids=lambda words: words[0],
)
def test_a_command_takes_a_name_and_says_which_model_it_is(txl, tmp_path, toy_text, words):
    (tmp_path / "here" / "text.txt").write_text(toy_text.read_text()[:400])
    ended = txl(*words)
    assert ended.code == 0, ended.err
    assert ended.err.splitlines()[0] == TOY
    assert ended.err.count(TOY) == 1


def test_a_recipe_may_begin_with_a_shipped_model(txl, toy_text, tmp_path, toy_recipe):

    config = toy_recipe(train={"steps": 2, "init_from": "toy"}, data={"tokenizer": "toy"})
    (tmp_path / "mine.toml").write_text(config.to_toml())
    for given in ((), ("--train.init_from", "toy-1")):
        ended = txl("train", tmp_path / "mine.toml", "--out", tmp_path / "run", *given)
        assert ended.code == 0, ended.err
    assert ended.err.startswith(TOY)


def test_a_recipe_comes_before_a_model_of_its_name(shipped, tmp_path, monkeypatch):
    from transformer_xl.cli import parse
    from transformer_xl.config import files

    shutil.copytree(shipped / "toy-1", tmp_path / "root" / "demo-1")
    monkeypatch.setattr(files, "SHIPPED", tmp_path / "root")
    assert parse(["train", "demo", "--out", "x"]).config() == load_recipe("demo")
    tuned = parse(["train", "demo-1", "--out", "x"]).config()
    assert tuned.train.init_from == str(tmp_path / "root" / "demo-1") == tuned.data.tokenizer
    assert tuned.model == txl_package.TransformerXL.from_pretrained("demo").config


def test_a_server_has_the_name_that_was_given(txl, monkeypatch):
    server = pytest.importorskip("transformer_xl.apps.serve.server")
    found = []
    monkeypatch.setattr(server, "serve", lambda *arguments: found.append(arguments))
    ended = txl("serve", "toy")
    assert (ended.code, ended.err) == (0, f"{TOY}\n")
    model, vocab, weights, _, name, generation = found[0]
    assert (name, generation.temperature) == ("toy", 0.5)
    assert len(vocab) == model.config.vocab_size
    assert weights.is_relative_to(txl_package.shipped_path("toy"))
