"""What ships is tried: every recipe file is a valid, complete recipe."""

import tomllib
from pathlib import Path

import pytest

from transformer_xl.config import Config
from transformer_xl.recipes import load_recipe, recipe_names

FOLDER = Path(__file__).parents[2] / "src" / "transformer_xl" / "recipes"
FILES = sorted(FOLDER.glob("*.toml"))


def test_every_recipe_file_has_a_name() -> None:
    assert sorted(recipe_names()) == [path.stem for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_recipe_is_a_config(path: Path) -> None:
    assert isinstance(load_recipe(path.stem), Config)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_recipe_says_at_its_head_what_it_is(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text.startswith(f"# {path.name}\n# "), (
        f"{path.name}: begin with `# {path.name}`, then why"
    )
    assert {"model", "data", "train"} <= tomllib.loads(text).keys()
