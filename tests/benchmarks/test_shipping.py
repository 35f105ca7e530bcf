"""What comes with the package is what was trained and measured, or nothing is written."""

import json
import random
import shutil
import sys
import tomllib
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from transformer_xl import train
from transformer_xl.config import files
from transformer_xl.config.recipes import load_recipe
from transformer_xl.config.shipped import ShippedModel

ROOT = Path(__file__).parents[2]
PROGRAMS = ("ship", "measuring", "shipping", "tang_poems", "writing_rows")


@pytest.fixture
def ship(monkeypatch):
    """The program scripts/pretrained/ship.py."""
    for folder in ("benchmarks", "scripts/pretrained"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    for name in PROGRAMS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return import_module("ship")


def background(ship, **others):
    """Figures of a training."""
    about = {"revision": "abc", "date": "2000-01-01", "packages": {"torch": "2.0"}}
    return {
        "processor": "a processor",
        "threads": 1,
        "python": "3.11",
        "steps": 9,
        "hours": 0.5,
        "version": 1,
        "sources": "none",
        "text_sha256": "0123",
        "origin": ship.origin(about, "2000-01-02", "def"),
        **others,
    }


def test_each_card_has_places_for_what_is_measured(ship):
    for name in ("chorales", "english", "python-code", "shakespeare", "tang-poems"):
        measured = dict.fromkeys((*ship.LOSSES, *ship.MEASURED[name].names), 0.5)
        integers = dict.fromkeys(("training_poems", "held_out_poems", "symbols"), 2)
        integers |= {"parameters": 10, "mem_len": 8, "n_preface": 3}
        head, text = ship.card(name, background(ship, **measured | integers))
        assert "{" not in head + text, name
        assert f"txl train {name} --out runs/pretrained/{name}/run" in text, name
        assert f"ship.py {name} 1" in text, name
        assert "Trained with revision abc of this repository, on 2000-01-01" in text, name
        assert tomllib.loads(head).keys() == {"summary", "data", "licence", "metrics"}
        with pytest.raises(ValueError, match=r"md has \{.*\}, which is not measured; known are"):
            ship.card(name, {"nll": 1.0})


@pytest.fixture(scope="module")
def trained(tmp_path_factory, toy_recipe):
    """A run of a tiny recipe, and the recipe."""
    folder, numbers = tmp_path_factory.mktemp("trained"), random.Random(0)
    song = [[numbers.randrange(60, 64) for _ in range(4)] for _ in range(10)]
    parts = {"train": [song] * 20, "valid": [song] * 3, "test": [[[60, 60, 60, 60]] * 3, song]}
    (folder / "text.json").write_text(json.dumps(parts))
    config = toy_recipe(
        data={"path": str(folder / "text.json"), "vocab": "integers"},
        train={"steps": 4},
        generate={"prompt": "\n", "length": 40},
    )
    train(config, folder / "run")
    return folder / "run", config


def test_the_memory_is_that_of_the_least_loss_on_the_validation_text(ship, trained, monkeypatch):
    run, config = trained
    config = replace(config, eval=replace(config.eval, mem_lens=(2, 4, 8)))
    losses = {("valid", 2): 1.5, ("valid", 4): 1.25, ("valid", 8): 1.75}

    def evaluated(model, recipe, corpus, split):
        return SimpleNamespace(nll=losses[split, recipe.eval.mem_len])

    monkeypatch.setattr(ship, "evaluated", evaluated)
    assert ship.best_memory(run, config, None) == 4
    without = replace(config, eval=replace(config.eval, mem_lens=()))
    assert ship.best_memory(run, without, None) == config.model.mem_len


@pytest.fixture
def chorales(ship, tmp_path, monkeypatch, trained, one_thread):
    """The run in place of one of `chorales`, in an empty package; returns its folder."""
    run, config = trained
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "chorales.toml").write_text(config.to_toml())
    monkeypatch.setattr(ship, "RECIPES", tmp_path / "recipes")
    monkeypatch.setattr(files, "SHIPPED", tmp_path / "shipped")
    # The path of this test's text is one of this machine.
    monkeypatch.setattr(ship, "write_rounded", without_path(ship.write_rounded, tmp_path))
    return shutil.copytree(run, tmp_path / "run")


def without_path(write_rounded, folder):
    def write(run, target, *others):
        write_rounded(run, target, *others)
        config = load_recipe(target / "recipe.toml")
        config = replace(config, data=replace(config.data, path="text.json"))
        (target / "recipe.toml").write_text(config.to_toml())

    return write


@pytest.mark.slow
def test_a_run_is_measured_and_shipped(ship, chorales, tmp_path, capsys):
    (tmp_path / "shipped" / "chorales-1").mkdir(parents=True)
    folder = ship.shipped("chorales", 1, chorales, is_dirty=True)
    assert [x.name for x in folder.parent.iterdir()] == ["chorales-1"]
    found = json.loads(capsys.readouterr().out)
    assert (found["real_median_chord"], found["real_most_chord"]) == (2, 3)
    assert 0 <= found["ended"] <= 1
    model = ShippedModel("chorales", 1, folder)
    assert model.card["metrics"] == {
        "nats per note (a voice in a sixteenth)": pytest.approx(found["nll"], abs=1e-3)
    }
    assert import_module("shipping").problems(folder) == []
    with pytest.raises(FileExistsError, match="chorales-1 exists and is not empty"):
        ship.shipped("chorales", 1, chorales, is_dirty=True)


def test_what_is_not_what_was_trained_is_refused_before_measuring(
    ship, chorales, tmp_path, monkeypatch
):
    def never(*words):
        raise AssertionError("it was measured")

    monkeypatch.setattr(ship, "losses", never)

    def refused(message, version=1):
        with pytest.raises((OSError, ValueError), match=message):
            ship.shipped("chorales", version, chorales, is_dirty=True)
        assert not files.SHIPPED.exists()

    recipe = tmp_path / "recipes" / "chorales.toml"
    text = recipe.read_text()
    recipe.write_text(text.replace("steps = 4", "steps = 5"))
    refused(r"another recipe than .*train\.steps: 4, 5\. Train again")
    recipe.write_text(text.replace("length = 40", "length = 30"))
    monkeypatch.setattr(ship, "CARDS", tmp_path)
    (tmp_path / "chorales.md").write_text("+++\n+++\n{what}\n")
    refused(r"has \{what\}, which is not measured")
    refused("version=0 must be at least 1", version=0)
    (chorales / "results.json").unlink()
    refused("results.json is missing: the run has not ended")


def test_a_loss_that_is_not_that_of_the_run_is_refused(ship, chorales):
    path = chorales / "results.json"
    results = json.loads(path.read_text())
    test = results["test"]
    changed = {"memory_curve": [test | {"nll": test["nll"] * 1.02}]}
    path.write_text(json.dumps(results | changed))
    with pytest.raises(ValueError, match=r"the loss is .* rounding to bfloat16 changes it"):
        ship.shipped("chorales", 1, chorales, is_dirty=True)
    path.write_text(json.dumps(results | {"memory_curve": [test | {"tokens": 3}]}))
    with pytest.raises(ValueError, match=r"another evaluation: tokens=3 there, .* here\."):
        ship.shipped("chorales", 1, chorales, is_dirty=True)
    assert not files.SHIPPED.exists()


def test_uncommitted_changes_are_refused(ship, monkeypatch, tmp_path):
    class Done:
        stdout = " M README.md\n"

    monkeypatch.setattr(ship.subprocess, "run", lambda *words, **others: Done)
    with pytest.raises(ValueError, match=r"README\.md have uncommitted changes.*--dirty"):
        ship.require_committed()
    Done.stdout = ""
    ship.require_committed()
