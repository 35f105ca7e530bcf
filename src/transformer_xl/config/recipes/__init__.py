"""Recipes: complete settings in TOML files, shipped or user-defined."""

import dataclasses
import re
import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from transformer_xl.config.checks import (
    ContradictionError,
    UnusedError,
    fields_of,
    near,
    read_settings,
)
from transformer_xl.config.config import Config
from transformer_xl.config.evaluation import GenerateConfig
from transformer_xl.config.locating import locate
from transformer_xl.errors import SettingsError

_GONE = (
    *("compare-mamba2", "compare-rwkv", "compare-xlnet", "compare-xlstm"),
    "compare-lstm-awd",
    *("digits-raw", "poems", "polarity", "sentiment", "sentiment-language", "sentiment-tuned"),
    *("translation-de-en", "translation-en-fr"),
)
"""Recipes of earlier versions, all in revision 47b3a2d."""


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def recipe_text(name: str) -> str:
    """Return the text of a shipped recipe.

    Raises:
        SettingsError: The name is unknown.
    """
    if name in _GONE:
        raise SettingsError(
            f"the recipe {name} is gone: it was in revision 47b3a2d of transformer_xl; `txl "
            "recipes` lists the recipes"
        )
    if name not in (names := recipe_names()):
        folder = Path(name).parent
        files = [str(x) for x in folder.iterdir()] if folder.is_dir() else []
        nearest = near(name, [*names, *files])
        hint = f"did you mean {nearest}? " if nearest else ""
        raise SettingsError(
            f"no recipe and no file is called {name!r}; {hint}`txl recipes` lists the recipes"
        )
    return resources.files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8")


def recipe_copy(name: str) -> str:
    """Return a shipped recipe as a template for other texts: ``vocab`` chars becomes bytes."""
    of_bytes = (
        '# Any text: the recipe has "chars", the characters of its corpus alone.\nvocab = "bytes"'
    )
    return re.sub(r'^vocab = "chars"$', of_bytes, recipe_text(name), flags=re.MULTILINE)


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


def dump_recipe(config: Config) -> str:
    """Format settings as a recipe, without those that are None, which TOML cannot express."""
    import tomli_w

    values = {
        section: {name: value for name, value in settings.items() if value is not None}
        for section, settings in dataclasses.asdict(config).items()
    }
    return tomli_w.dumps(values)


def differences(one: Config, other: Config) -> list[str]:
    """List the differences between two recipes, as ``section.key: one, other``."""
    found = []
    for section in dataclasses.fields(Config):
        left, right = getattr(one, section.name), getattr(other, section.name)
        # A setting that one kind of model does not have is at its default there.
        for name in {**fields_of(type(left)), **fields_of(type(right))}:
            a, b = getattr(left, name), getattr(right, name)
            if a != b:
                found.append(f"{section.name}.{name}: {a!r}, {b!r}")
    return found


def changed(
    config: Config, given: Mapping[str, Mapping[str, Any]], say: Callable[[str], None]
) -> Config:
    """Return a recipe with settings in place of its own.

    Where settings of the recipe contradict given ones, or have no effect beside them, those of the
    recipe give way, which ``say`` is told. What was given never does.

    Args:
        config: The recipe.
        given: Settings by section and name.
        say: Is told which settings of the recipe have changed, and why.

    Raises:
        SettingsError: A given setting is invalid, or contradicts another one.
    """
    kinds: Any = {x.name: x.type for x in dataclasses.fields(Config)}
    sections = {name: dict(given.get(name, {})) for name in kinds}
    why: dict[str, str] = {}
    while True:
        try:
            changed = {
                name: dataclasses.replace(getattr(config, name), **values)
                for name, values in sections.items()
            }
            found = dataclasses.replace(config, **changed)
            break
        except (UnusedError, ContradictionError) as error:
            cls = error.settings if isinstance(error.settings, type) else type(error.settings)
            section = next(name for name, kind in kinds.items() if issubclass(cls, kind))
            is_given = error.name in given.get(section, {})
            if is_given or (error.name, error.value) in sections[section].items():
                raise
            sections[section][error.name] = error.value
            # Without the remedy.
            reason = re.split(r"[:;]|\. ", str(error))[0]
            why.setdefault(f"{section}.{error.name}", reason)
    for name, reason in why.items():
        section, _, key = name.partition(".")
        say(f"note: {reason}; {name}={_shown(getattr(getattr(found, section), key))} is taken")
    return found


def _shown(value: Any) -> str:
    is_list = type(value) is tuple
    return str([list(x) if type(x) is tuple else x for x in value]) if is_list else repr(value)
