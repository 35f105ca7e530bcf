"""The models that come with the package are complete, small and what their cards say."""

import json
import shutil

import pytest

from transformer_xl import shipped_path
from transformer_xl.config import files
from transformer_xl.config.recipes import generation_of
from transformer_xl.config.shipped import ShippedModel
from transformer_xl.model import load_model

SHIPPED = ShippedModel.all()


@pytest.mark.parametrize("model", SHIPPED, ids=lambda model: model.full_name)
def test_a_shipped_model_is_complete(model, shipping):
    assert shipping.problems(model.folder) == []


def test_shipped_models_are_small_together(shipping):
    assert sum(model.n_bytes for model in SHIPPED) <= shipping.LARGEST


def test_the_folder_of_shipped_models_has_nothing_else():
    names = {model.full_name for model in SHIPPED} | {"README.md"}
    assert {path.name for path in files.SHIPPED.iterdir()} == names


def test_a_name_without_a_version_is_the_newest(shipped):
    assert [model.full_name for model in ShippedModel.all()] == ["notes-2", "notes-1", "toy-1"]
    assert [model.full_name for model in ShippedModel.newest()] == ["notes-2", "toy-1"]
    assert shipped_path("notes") == shipped / "notes-2"
    assert shipped_path("notes-1") == shipped / "notes-1"
    assert ShippedModel.find("notes-3") is None
    with pytest.raises(ValueError, match=r"called 'note'; shipped models: notes, toy; did you"):
        shipped_path("note")


def test_what_is_shipped_is_what_was_made(shipped, shipping):
    for model in ShippedModel.all():
        assert shipping.problems(model.folder) == []
        assert model.n_parameters == sum(x.numel() for x in load_model(model.folder).parameters())
        assert model.n_bytes == sum(path.stat().st_size for path in model.folder.rglob("*"))
    about = ShippedModel.find("toy").about()
    assert about["summary"] == "writes like toy"
    assert about["metrics"] == {"bits per byte on nothing": 8.0}


def test_the_recipe_of_a_shipped_model_says_how_it_generates(shipped):
    settings = generation_of("toy")
    assert settings == generation_of(shipped / "toy-1")
    assert (settings.prompt, settings.length, settings.temperature) == ("the ", 9, 0.5)


@pytest.mark.parametrize("name", ["config.json", "README.md", "vocab.json"])
def test_a_changed_file_is_found(shipped_root, shipping, tmp_path, name):
    folder = tmp_path / "toy-1"
    shutil.copytree(shipped_root / "toy-1", folder)
    (folder / name).write_bytes((folder / name).read_bytes() + b"\n")
    with pytest.raises(RuntimeError, match=f"{name} has changed"):
        ShippedModel.verify(folder)
    assert any("has changed" in problem for problem in shipping.problems(folder))
    shipping.write_sums(folder)
    ShippedModel.verify(folder)
    (folder / "more").write_text("")
    with pytest.raises(RuntimeError, match="more is not listed"):
        ShippedModel.verify(folder)
    (folder / "more").unlink()
    (folder / name).unlink()
    with pytest.raises(RuntimeError, match=f"{name} is missing"):
        ShippedModel.verify(folder)
    assert shipping.problems(folder) == [f"{name} is missing"]


@pytest.mark.parametrize(
    ("name", "before", "after", "problem"),
    [
        ("README.md", "## Limits\n", "", "has no heading Limits"),
        ("README.md", "Words", "/home/me/words", "names a path of one machine: /home/me/words"),
        ("model.toml", "summary", "sumnary", "model.toml: summary is empty or more than a line"),
        ("model.toml", "= 8.0", '= "8"', "must be a number"),
        ("model.toml", 'summary = "', 'summary = "" #', "summary is empty or more than a line"),
        ("recipe.toml", 'prompt = "the "', 'prompt = ""', "the prompt of the recipe is empty"),
    ],
)
def test_what_a_card_lacks_is_named(shipped_root, shipping, tmp_path, name, before, after, problem):
    folder = tmp_path / "toy-1"
    shutil.copytree(shipped_root / "toy-1", folder)
    text = (folder / name).read_text()
    assert before in text
    (folder / name).write_text(text.replace(before, after))
    shipping.write_sums(folder)
    assert any(problem in each for each in shipping.problems(folder))


def test_what_is_incomplete_is_not_shipped(shipped_root, shipping, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SHIPPED", tmp_path / "root")
    folder = shipped_root / "toy-1"
    (tmp_path / "card.md").write_text("# Nothing\n")
    with pytest.raises(ValueError, match="no heading Data"):
        shipping.ship(folder, "toy", 1, tmp_path / "card.md", folder / "model.toml", None)
    assert not files.SHIPPED.exists()
    made = shipping.ship(folder, "toy", 1, folder / "README.md", folder / "model.toml", None)
    assert {path.name: path.read_bytes() for path in made.iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
    with pytest.raises(FileExistsError):
        shipping.ship(folder, "toy", 1, folder / "README.md", folder / "model.toml", None)


def test_sums_are_those_of_sha256sum(shipped_root):
    for line in (shipped_root / "toy-1" / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert digest == files.checksum(shipped_root / "toy-1" / name)
    assert json.loads((shipped_root / "toy-1" / "config.json").read_text())["model_type"]
