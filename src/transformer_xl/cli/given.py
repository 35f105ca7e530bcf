"""Settings of a recipe that are given on the command line: ``--section.key value``."""

import ast
import inspect
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    TypedDict,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro

from transformer_xl.config import (
    Config,
    DataConfig,
    ModelConfig,
    TrainConfig,
    checked,
    classes_of,
    fields_of,
    hints_of,
    load_recipe,
)
from transformer_xl.errors import SettingsError

_Section = TypeVar("_Section")

READ_BY_SEGMENTS = ("segment_len", "mem_len", "attn_len", "clamp_len", "ext_len", "batch_size")
"""Settings of an evaluation that apply wherever a text is read segment by segment."""

# Booleans take a value, too.
Value = tyro.conf.FlagConversionOff
Recipe = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
# No Path, which is the same for ./english as for the name english.
# Defined here, so that help does not import torch.
Weights = Literal["float32", "bfloat16", "int8"]
Folder = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]


class Given(dict[str, Any], Generic[_Section]):
    """The settings of a section that are given, by name.

    The parser sees a dictionary in which every key is optional, so a command knows which settings
    were given; the others come from the recipe when the command runs.
    """

    _short: tuple[str, ...] = ()

    if not TYPE_CHECKING:

        @classmethod
        @cache
        def __class_getitem__(cls, section: type) -> Any:
            """Return the type of such a dictionary for a section."""
            hints = hints_of(section)
            keys = {
                name: Annotated[hints[name], _argument(section, x, name in cls._short)]
                for name, x in fields_of(section).items()
            }
            return Annotated[
                TypedDict(section.__name__, keys, total=False), Value, section, cls._short
            ]


class GivenWithLengths(Given[_Section] if TYPE_CHECKING else Given):
    """The same, with lengths that can be given without the name of the section."""

    _short = READ_BY_SEGMENTS


def nothing() -> Any:
    """Return the default of a section: no settings given."""
    return {}


def _argument(section: type, field: Field, has_short_name: bool) -> Any:
    """Describe a setting to the parser."""
    # A callable: the source code is parsed only when the help is printed.
    text: Any = lambda: field_docstrings(section).get(field.name, "")  # noqa: E731
    origin = ["from the recipe"] if "config" in section.__module__ else []
    default = [] if field.default is MISSING else [f"default: {field.default}"]
    return tyro.conf.arg(
        help=text,
        help_behavior_hint=f"({'; '.join(origin + default)})",
        aliases=(f"--{field.name}",) if has_short_name else None,
    )


@cache
def field_docstrings(section: type) -> dict[str, str]:
    """Return the docstring below each field of a class, from its source code."""
    texts, name = {}, ""
    for cls in {base: None for each in classes_of(section) for base in each.__mro__[-2::-1]}:
        (definition,) = ast.parse(inspect.getsource(cls)).body
        assert isinstance(definition, ast.ClassDef)
        for node in definition.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                texts.setdefault(name, " ".join(str(node.value.value).split()))
    return texts


def check_given(command: Any) -> None:
    """Validate each given setting by the rules of its section.

    Raises:
        SettingsError: A setting has a wrong type, is out of range, or is unknown.
    """
    for name, hint in get_type_hints(type(command), include_extras=True).items():
        about = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        section = next((x for x in about if isinstance(x, type) and is_dataclass(x)), None)
        if section is not None:
            has_prefix = tyro.conf.OmitArgPrefixes not in about
            checked(section, getattr(command, name), name if has_prefix else "")


def refuse_others(given: Mapping[str, Any], section: str, names: tuple[str, ...], why: str) -> None:
    """Refuse given settings that would have no effect: those that are not in ``names``."""
    for name, value in given.items():
        if name not in names:
            raise SettingsError(f"--{section}{name} {value} has no effect here: {why}")


@dataclass(kw_only=True)
class LoadsModels:
    """A command that loads a model, which may be from elsewhere, or trains on from one."""

    any_size: bool = False
    """Load a model even if it takes more memory than the machine has, or more than 2 minutes."""


@dataclass(kw_only=True)
class ReadsModel(LoadsModels):
    """A command that reads or writes text with a model."""

    dir: Folder
    """A model folder, a run folder, or the name of a model (txl models)."""
    weights: Weights = "float32"
    """Precision of the weights: quantized ones are faster; txl eval measures the loss."""


@dataclass(kw_only=True)
class PrintsResult:
    """A command that prints a result, as a table or as JSON."""

    json: bool = False
    """Print the result as one JSON object on the last line."""


@dataclass(kw_only=True)
class RecipeCommand(PrintsResult):
    """A command that takes a recipe and settings that replace those of the recipe."""

    recipe: Recipe
    """A recipe by its name or file."""
    model: Given[ModelConfig] = field(default_factory=nothing)
    data: Given[DataConfig] = field(default_factory=nothing)
    train: Given[TrainConfig] = field(default_factory=nothing)

    def config(self) -> Config:
        """Return the recipe with the given settings."""
        return self.changed(load_recipe(self.recipe))

    def changed(self, config: Config) -> Config:
        """Return a configuration with the given settings."""
        sections = (x.name for x in fields(Config) if hasattr(self, x.name))
        return replace(
            config, **{x: replace(getattr(config, x), **getattr(self, x)) for x in sections}
        )
