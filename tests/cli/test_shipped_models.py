"""Commands take the name of a model that comes with the package, and say which one they took."""

import json
import shutil
from pathlib import Path

import pytest

import transformer_xl as txl_package
from transformer_xl.config.recipes import load_recipe
from transformer_xl.model import load_model
from transformer_xl.model.pretrained import model_weights, write_model

pytestmark = pytest.mark.usefixtures("one_thread", "shipped")
TOY = "using the shipped model toy (version 1)"


def test_the_list_says_what_there_is(txl, shipped):
    code, out, err = txl("models")
    assert (code, err) == (0, "")
    notes, *about, toy = (line for line in out.splitlines() if not line.startswith("  "))
    assert (notes, about) == ("notes (version 2): writes like notes", [])
    assert toy == "toy (version 1): writes like toy"
    assert "  figure   8 bits per byte on nothing\n" in out
    assert "  licence  CC0-1.0 (weights and data)\n" in out
    found = txl("models", "--json").json
    assert [*found] == ["notes", "toy"]
    assert found["toy"]["folder"] == str(shipped / "toy-1")
    assert found["toy"] == txl("models", "toy", "--json").json
    assert found["toy"]["metrics"] == {"bits per byte on nothing": 8.0}


def test_a_card_is_shown_as_it_is(txl, shipped):
    code, out, _ = txl("models", "notes-1")
    assert (code, out) == (0, (shipped / "notes-1" / "README.md").read_text())
    code, out, err = txl("models", "tou")
    assert (code, out) == (2, "")
    assert "no shipped model is called 'tou'; shipped models: notes, toy; did you mean toy?" in err


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


def test_generate_writes_as_the_recipe_of_the_model_says(txl, shipped):
    by_name = txl("generate", "toy")
    assert by_name.out == txl("generate", shipped / "toy-1").out
    assert by_name.out.startswith("the ")
    assert "temperature 0.5" in by_name.err
    found = txl("generate", "toy", "--prompt", "a dog", "--json").json
    assert (found["prompt"], found["settings"]["length"]) == ("a dog", 9)


def test_a_folder_of_the_name_is_taken_and_said(txl, shipped):
    shutil.copytree(shipped / "notes-1", "toy")
    ended = txl("generate", "toy", "--prompt", "so it", "--length", "4")
    assert ended.code == 0
    assert ended.err.startswith("using the folder toy, not the shipped model toy-1\n")


def test_a_path_on_the_command_line_is_never_a_name(txl):
    Path("text").write_text("the cat")
    for words in [
        ("generate", "./toy"),
        ("eval", "./toy"),
        ("score", "./toy", "text"),
        ("doctor", "./toy"),
        ("export", "./toy", "out"),
        ("recl", "./toy"),
        ("train", "./toy", "--out", "out"),
        ("compress", "text", "--model", "./toy"),
        ("report", "./toy"),
    ]:
        code, _, err = txl(*words)
        assert code in (1, 2), words
        assert "toy" in err, words
        assert "using the shipped model" not in err, words
        assert not Path("out").exists(), words


def test_a_damaged_shipped_model_is_named(txl, shipped, tmp_path, monkeypatch):
    from transformer_xl.config import files

    assert "verified" in txl("doctor", "toy").out
    shutil.copytree(shipped, tmp_path / "copy")
    monkeypatch.setattr(files, "SHIPPED", tmp_path / "copy")
    with (tmp_path / "copy" / "toy-1" / "recipe.toml").open("a") as file:
        file.write("\n")
    code, out, _ = txl("doctor", "toy")
    assert code == 1
    assert "recipe.toml has changed; install transformer-xl again" in " ".join(out.split())


def test_one_damaged_model_does_not_hide_the_others(txl, shipped, tmp_path, monkeypatch):
    from transformer_xl.config import files

    shutil.copytree(shipped, tmp_path / "copy")
    monkeypatch.setattr(files, "SHIPPED", tmp_path / "copy")
    (tmp_path / "copy" / "toy-2").mkdir()
    code, out, _ = txl("models")
    assert (code, "toy (version 1)" in out) == (0, True)
    (tmp_path / "copy" / "notes-2" / "model.safetensors").write_bytes(b"x" * 100)
    code, out, err = txl("models")
    assert (code, "toy (version 1)" in out) == (1, True)
    assert "notes-2 cannot be read, install transformer-xl again: " in err
    ended = txl("models", "--json")
    assert (ended.code, [*ended.json]) == (1, ["toy"])


@pytest.mark.slow
def test_a_shipped_model_is_fine_tuned_as_a_float32_copy_of_it(txl, shipped, toy_text, tmp_path):
    own = load_model("toy")
    exact = tmp_path / "exact"
    write_model(own.config, model_weights(own), exact)
    for name in ("vocab.json", "tokenizer.json", "recipe.toml"):
        shutil.copy(shipped / "toy-1" / name, exact)
    assert {x.dtype for x in own.parameters()} == {x.dtype for x in load_model(exact).parameters()}
    more = ("--data.path", toy_text, "--train.steps", "2", "--train.eval_every", "1", "--json")
    losses, tuned = [], []
    for number, name in enumerate(("toy", exact)):
        out = tmp_path / f"run-{number}"
        ended = txl("train", name, "--out", out, *more)
        assert ended.code == 0, ended.err
        assert ended.err.startswith(TOY) == (name == "toy")
        lines = (out / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line).get("loss") for line in lines])
        tuned.append(model_weights(load_model(out)))
    assert losses[0] == losses[1]
    assert all(tuned[0][name].equal(x) for name, x in tuned[1].items())
    assert not all(tuned[0][name].equal(x) for name, x in model_weights(own).items())


def test_a_recipe_may_begin_with_a_shipped_model(txl, toy_text, tmp_path, toy_recipe):
    from transformer_xl.config.recipes import dump_recipe

    config = toy_recipe(train={"steps": 2, "init_from": "toy"}, data={"tokenizer": "toy"})
    (tmp_path / "mine.toml").write_text(dump_recipe(config))
    for given in ((), ("--train.init_from", "toy-1")):
        ended = txl("train", tmp_path / "mine.toml", "--out", tmp_path / "run", *given)
        assert ended.code == 0, ended.err
    assert ended.err.startswith(TOY)
    ended = txl("train", tmp_path / "mine.toml", "--out", "x", "--train.init_from", "toz")
    assert ended.code == 1
    assert "did you mean toy?" in ended.err


def test_a_recipe_comes_before_a_model_of_its_name(shipped, tmp_path, monkeypatch):
    from transformer_xl.cli import parse
    from transformer_xl.config import files

    shutil.copytree(shipped / "toy-1", tmp_path / "root" / "demo-1")
    monkeypatch.setattr(files, "SHIPPED", tmp_path / "root")
    assert parse(["train", "demo", "--out", "x"]).config() == load_recipe("demo")
    tuned = parse(["train", "demo-1", "--out", "x"]).config()
    assert tuned.train.init_from == str(tmp_path / "root" / "demo-1") == tuned.data.tokenizer
    assert tuned.model == txl_package.TransformerXL.from_pretrained("demo").config


def test_training_does_not_write_into_a_shipped_model(txl, shipped, toy_text):
    ended = txl("train", "toy", "--out", shipped / "toy-1", "--data.path", toy_text)
    assert ended.code == 1
    assert "come with the package, which are not changed" in ended.err


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
