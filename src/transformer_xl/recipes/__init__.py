"""Recipes: complete settings in TOML files, shipped ones and one's own."""

import dataclasses
import difflib
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from transformer_xl.config import Config


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def recipe_text(name: str) -> str:
    """Return a shipped recipe as it is written.

    Raises:
        ValueError: There is none of that name.
    """
    names = recipe_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"no recipe and no file is called {name!r}; {hint}`txl recipes` lists the recipes"
        )
    return resources.files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8")


def recipe_copy(name: str) -> str:
    """Return a shipped recipe to be changed: characters of one text give way to bytes of any.

    Raises:
        ValueError: There is none of that name.
    """
    of_bytes = (
        '# Any text: the recipe has "chars", the characters of its corpus alone.\nvocab = "bytes"'
    )
    return re.sub(r'^vocab = "chars"$', of_bytes, recipe_text(name), flags=re.MULTILINE)


def load_recipe(recipe: str | Path) -> Config:
    """Read a recipe: a TOML file, or the name of a shipped one.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The recipe is unknown, no TOML, or has a wrong key, type or value.
    """
    path = Path(recipe)
    if path.suffix != ".toml" and not path.is_file():
        return parse_recipe(recipe_text(str(recipe)), f"recipe {recipe}")
    if not path.is_file():
        raise FileNotFoundError(f"the recipe file {path} does not exist")
    try:
        # Some editors begin a file with a byte order mark.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a recipe: it is not text ({error})") from error
    except OSError as error:
        raise OSError(f"cannot read the recipe {path}: {error.strerror}") from error
    return parse_recipe(text, str(path))


def parse_recipe(text: str, source: str) -> Config:
    """Turn the text of a recipe into settings; ``source`` names it in errors."""
    # Only needed here, and not by those who only use a model.
    import msgspec

    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source} is not valid TOML: {error}") from error
    _check_keys(values, Config, source, ())
    try:
        return msgspec.convert(values, Config)
    except msgspec.ValidationError as error:
        # "Expected `int`, got `str` - at `$.model.n_layer`" becomes "model.n_layer: expected ..."
        what, _, where = str(error).partition(" - at `$.")
        where = where.rstrip("`")
        what = f"{what[:1].lower()}{what[1:]}{_choices(where)}"
        raise ValueError(f"{source}: {where}{': ' if where else ''}{what}") from error


def dump_recipe(config: Config) -> str:
    """Write settings as a recipe; settings that are None are left out, as TOML has no None."""
    import tomli_w

    return tomli_w.dumps(_without_none(dataclasses.asdict(config)))


def differences(one: Config, other: Config) -> list[str]:
    """List the settings in which two recipes differ, as ``section.key: one, other``."""
    found = []
    for section in dataclasses.fields(Config):
        left, right = getattr(one, section.name), getattr(other, section.name)
        for field in dataclasses.fields(left):
            a, b = getattr(left, field.name), getattr(right, field.name)
            if a != b:
                found.append(f"{section.name}.{field.name}: {a!r}, {b!r}")
    return found


def _check_keys(values: dict[str, Any], kind: type, source: str, where: tuple[str, ...]) -> None:
    fields: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(kind)}
    for key, value in values.items():
        name = ".".join((*where, key))
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(fields)}"
            raise ValueError(f"{source}: {name}: no such setting; {hint}")
        if dataclasses.is_dataclass(fields[key]):
            if not isinstance(value, dict):
                raise ValueError(f"{source}: {name} is a section: write [{name}] and keys below it")
            _check_keys(value, fields[key], source, (*where, key))


def _choices(setting: str) -> str:
    """Return what a setting may be, if that is one of a few words."""
    kind: Any = Config
    for key in setting.split("."):
        fields = {f.name: f.type for f in dataclasses.fields(kind)}
        if key not in fields:
            return ""
        kind = fields[key]
        if not dataclasses.is_dataclass(kind):
            break
    if get_origin(kind) is not Literal:
        return ""
    return f"; expected one of {', '.join(map(repr, get_args(kind)))}"


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None
    }
