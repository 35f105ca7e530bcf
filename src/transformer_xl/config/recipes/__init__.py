"""Recipes: complete settings in TOML files, shipped or user-defined."""

import tomllib
from importlib import resources
from pathlib import Path

from transformer_xl.config.checks import near, read_settings
from transformer_xl.config.config import Config
from transformer_xl.config.evaluation import GenerateConfig
from transformer_xl.config.gone import GONE
from transformer_xl.config.locating import locate
from transformer_xl.errors import SettingsError


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def recipe_text(name: str) -> str:
    """Return the text of a shipped recipe.

    Raises:
        SettingsError: The name is unknown.
    """
    if why := GONE.get(f"recipe.{name}"):
        raise SettingsError(f"the recipe {name} is gone: {why}")
    if name not in (names := recipe_names()):
        folder = Path(name).parent
        files = [str(x) for x in folder.iterdir()] if folder.is_dir() else []
        nearest = near(name, [*names, *files])
        hint = f"did you mean {nearest}? " if nearest else ""
        if "/" in name and not nearest:
            hint = "curl -O gets a text at a URL, and hf download a model of the hub; "
        raise SettingsError(
            f"no recipe and no file is called {name!r}; {hint}`txl recipes` lists the recipes"
        )
    return resources.files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8")


def load_recipe(recipe: str | Path, *, is_stored: bool = False) -> Config:
    """Read a recipe: a TOML file, or the name of a shipped one.

    Args:
        recipe: The file or the name.
        is_stored: Whether it is the recipe of a run. Settings without effect, which earlier
            versions wrote, are then dropped and not refused.

    Raises:
        FileNotFoundError: The file does not exist.
        SettingsError: The recipe is unknown, not TOML, or has a wrong key, type or value.

    Example:
        >>> load_recipe("demo").model.n_layer
        4
    """
    path = Path(recipe)
    if path.suffix != ".toml" and not path.is_file():
        return parse_recipe(recipe_text(str(recipe)), f"recipe {recipe}")
    if not path.is_file():
        raise FileNotFoundError(f"the recipe file {path} does not exist")
    try:
        # Some editors write a byte order mark.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not a recipe: it is not text ({error})") from error
    except OSError as error:
        raise OSError(f"cannot read the recipe {path}: {error.strerror}") from error
    return parse_recipe(text, str(path), is_stored=is_stored)


def recipe_of(name: Path | str) -> Config | None:
    """Return the recipe in the folder of a model, or of the run that contains a model folder.

    ``name`` and errors are those of :func:`~transformer_xl.config.locating.locate`.
    """
    folder = locate(name).path.resolve()
    run = [folder.parent.parent] if folder.parent.name == "model" else []
    recipes = (place / "recipe.toml" for place in (folder, *run))
    return next((load_recipe(x, is_stored=True) for x in recipes if x.is_file()), None)


def generation_of(name: Path | str) -> GenerateConfig:
    """Return the default generation settings of a model or run folder.

    They are the section ``[generate]`` of the recipe of its training, or else the defaults of
    :class:`GenerateConfig`. `txl generate` and `txl serve` use them.
    """
    recipe = recipe_of(name)
    return GenerateConfig() if recipe is None else recipe.generate


def parse_recipe(text: str, source: str, *, is_stored: bool = False) -> Config:
    """Parse the text of a recipe; ``source`` names it in errors."""
    try:
        values = tomllib.loads(text)
    except RecursionError as error:
        raise SettingsError(f"{source} is not valid TOML: it is nested too deeply") from error
    except ValueError as error:
        # Also a number of more digits than Python reads.
        raise SettingsError(f"{source} is not valid TOML: {error}") from error
    return read_settings(Config, values, source, is_stored=is_stored)
