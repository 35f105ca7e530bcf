"""The settings of a recipe that a command line gives: ``--section.key value``."""

import ast
import inspect
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypedDict, TypeVar, get_type_hints

import tyro

from transformer_xl.config import Config, DataConfig, ModelConfig, TrainConfig
from transformer_xl.config.checks import checked
from transformer_xl.config.recipes import load_recipe

_Section = TypeVar("_Section")

READ_BY_SEGMENTS = ("segment_len", "mem_len", "attn_len", "clamp_len", "ext_len", "batch_size")
"""Settings of an evaluation that hold wherever a text is read by segments."""

# Also a switch is followed by its value.
Value = tyro.conf.FlagConversionOff
Recipe = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]


def _about(section: type, field: Field) -> Any:
    # What takes a while is done when the help is printed.
    text: Any = lambda: _docstrings(section).get(field.name, "")  # noqa: E731
    default = "" if field.default is MISSING else f"; by default {field.default}"
    return tyro.conf.arg(help=text, help_behavior_hint=f"(as the recipe says{default})")


@cache
def _docstrings(section: type) -> dict[str, str]:
    """Return what stands below each field of a class in its source code."""
    (definition,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    found, name = {}, ""
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[name] = " ".join(str(node.value.value).split())
    return found


if TYPE_CHECKING:

    class Given(dict[str, Any], Generic[_Section]):
        """The settings of a section that are given, by name."""
else:

    class Given:
        """The type of a dictionary of the settings of a section that are given.

        To the parser it is one of which any key may be missing. So a command knows what was asked
        for, and what its recipe says is looked up when the command runs.
        """

        @classmethod
        @cache
        def __class_getitem__(cls, section: type) -> Any:
            """Return the type for a section."""
            hints = get_type_hints(section, include_extras=True)
            keys = {x.name: Annotated[hints[x.name], _about(section, x)] for x in fields(section)}
            return Annotated[TypedDict(section.__name__, keys, total=False), Value, section]


def check_given(command: Any) -> None:
    """Check each setting that a command was given by the rule of its section.

    Raises:
        ValueError: One is of a wrong type, out of range or unknown.
    """
    hints = get_type_hints(type(command), include_extras=True)
    for name, hint in hints.items():
        about = getattr(hint, "__metadata__", ())
        if sections := [x for x in about if isinstance(x, type) and is_dataclass(x)]:
            is_plain = tyro.conf.OmitArgPrefixes in about
            checked(sections[0], getattr(command, name), "" if is_plain else name)


def nothing() -> Any:
    """Return the default of a section, of which nothing is given."""
    return {}


@dataclass(kw_only=True)
class RecipeCommand:
    """A command about a recipe, of which settings are given."""

    recipe: Recipe
    """A recipe by its name or file."""
    json: bool = False
    """Print the result as one JSON object on the last line."""
    model: Given[ModelConfig] = field(default_factory=nothing)
    data: Given[DataConfig] = field(default_factory=nothing)
    train: Given[TrainConfig] = field(default_factory=nothing)

    def config(self) -> Config:
        """Return the recipe with the settings that are given.

        Raises:
            FileNotFoundError: There is no such recipe.
            ValueError: A setting is refused.
        """
        return self.changed(load_recipe(self.recipe))

    def changed(self, config: Config) -> Config:
        """Return a recipe with the settings that are given.

        Raises:
            ValueError: One is refused.
        """
        sections = (x.name for x in fields(Config) if hasattr(self, x.name))
        return replace(
            config, **{x: replace(getattr(config, x), **getattr(self, x)) for x in sections}
        )


def refuse_others(given: Mapping[str, Any], section: str, names: tuple[str, ...], why: str) -> None:
    """Refuse a setting that is given where it would change nothing.

    Raises:
        ValueError: One is given that is none of ``names``.
    """
    for name, value in given.items():
        if name not in names:
            raise ValueError(f"--{section}{name} {value} changes nothing here: {why}")
