"""recipes, prepare, train and doctor, as a user types them."""

import re
from pathlib import Path

import pytest
import torch

from transformer_xl.apps import timing
from transformer_xl.config.recipes import load_recipe, recipe_names, recipe_text

pytestmark = pytest.mark.usefixtures("one_thread")


def test_recipes_lists_each_with_its_summary(txl):
    code, out, err = txl("recipes")
    assert (code, err) == (0, "")
    listed = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert [*listed] == recipe_names()
    assert txl("recipes", "--json").json == listed
    assert all(f"# {summary}\n" in recipe_text(name) for name, summary in listed.items())


def test_recipes_shows_one(txl):
    assert txl("recipes", "demo") == (0, recipe_text("demo"), "")
    assert txl("recipes", "demo", "--json").json["data"]["name"] == "python-stdlib"


def test_recipes_copies_one_that_can_be_trained(txl, tmp_path):
    ended = txl("recipes", "demo", "--copy", tmp_path / "mine.toml")
    assert (ended.code, ended.out) == (0, "")
    assert f"txl train {tmp_path / 'mine.toml'}" in ended.err
    assert load_recipe(tmp_path / "mine.toml") == load_recipe("demo")
    ended = txl("recipes", "demo", "--copy", tmp_path / "other.toml", "--json")
    assert ended.json == {"file": str(tmp_path / "other.toml")}


def test_recipes_copies_over_nothing(txl, tmp_path):
    (tmp_path / "mine.toml").write_text("mine")
    code, out, err = txl("recipes", "demo", "--copy", tmp_path / "mine.toml")
    assert (code, out) == (1, "")
    assert "mine.toml: File exists" in err
    assert (tmp_path / "mine.toml").read_text() == "mine"


def test_prepare_says_where_the_tokens_are(txl, toy_toml, toy_text):
    ended = txl("prepare", toy_toml, "--data.vocab", "bytes", "--json")
    assert ended.code == 0
    found = ended.json
    n_tokens = found["train"] + found["valid"] + found["test"]
    assert (n_tokens, found["vocab"]) == (toy_text.stat().st_size, 256)
    assert Path(found["folder"], "manifest.json").exists()
    table = dict(line.split(maxsplit=1) for line in txl("prepare", toy_toml).out.splitlines())
    assert int(table["train"]) == found["train"]


def test_train_prints_its_result_on_stdout_and_the_rest_on_stderr(txl, toy_toml, tmp_path):
    ended = txl("train", toy_toml, "--out", tmp_path / "run", "--train.steps", 2, "--json")
    assert ended.code == 0
    assert {"split", "tokens", "nll", "ppl", "bpc", "bits_per_byte", "mem_len"} <= {*ended.json}
    assert "step 2: validation" in ended.err
    assert f"next: txl generate {tmp_path / 'run'}" in ended.err
    assert load_recipe(tmp_path / "run" / "recipe.toml").train.steps == 2


def test_train_refuses_a_folder_of_another_recipe(txl, toy_toml, trained):
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    code, out, err = txl("train", toy_toml, "--out", trained, "--model.n_layer", 1)
    assert (code, out) == (2, "")
    assert "run of another recipe (there, here): model.n_layer: 2, 1. Give another --out" in err
    code, out, err = txl("train", toy_toml, "--out", trained, "--train.steps", 99)
    assert (code, out) == (2, "")
    assert f"begins anew: txl train {trained} --out NEW" in err
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before


def test_doctor_says_what_would_be_used_and_why(txl, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(timing, "CEILING_WIDTH", {"cpu": 64})
    found = txl("doctor", "--json").json
    assert found["device"] == "cpu"
    assert found["precision"].split(":")[0] in ("float32", "bfloat16")
    assert found["attention on cpu"].startswith("skew: ")
    assert found["loss on cpu"].startswith("operations of torch: the fused kernels are for a GPU")
    assert re.match(r"[\d,]+ tokens/s evaluated, .* of a large", found["speed"])
    assert found["packages"]["torch"] == str(torch.__version__)
