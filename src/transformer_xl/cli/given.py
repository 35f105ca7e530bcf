"""What commands have in common: options, and settings of a recipe, ``--section.key value``."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass
from functools import cache
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    TypedDict,
    TypeVar,
)

import tyro
from docstring_parser import parse_from_object

from transformer_xl.config import fields_of
from transformer_xl.errors import SettingsError

_Section = TypeVar("_Section")

# Booleans take a value, too.
Value = tyro.conf.FlagConversionOff
Recipe = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
# No Path, which is the same for ./english as for the name english.
Folder = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
# Defined here, so that help does not import torch.
Weights = Literal["float32", "bfloat16", "int8", "int4"]


class Given(dict[str, Any], Generic[_Section]):
    """The settings of a section that are on the command line, by name.

    The parser sees a dictionary in which every key is optional, so a command knows which settings
    were given; the others come from the recipe when the command runs.
    """

    _short: tuple[str, ...] = ()

    if not TYPE_CHECKING:

        @classmethod
        @cache
        def __class_getitem__(cls, section: type) -> Any:
            """Return the type of such a dictionary for a section."""
            keys = {
                name: Annotated[x.type, _argument(section, x, name in cls._short)]
                for name, x in fields_of(section).items()
            }
            return Annotated[TypedDict(section.__name__, keys, total=False), Value]


class GivenWithLengths(Given[_Section] if TYPE_CHECKING else Given):
    """The same, with lengths that can be given without the name of the section."""

    _short = ("segment_len", "mem_len", "attn_len", "clamp_len", "ext_len", "batch_size")


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
    """Return the docstring below each field of a class."""
    texts: dict[str, str] = {}
    every = getattr(section, "classes", lambda: (section,))()
    for cls in {base: None for each in reversed(every) for base in each.__mro__[-2::-1]}:
        for field in parse_from_object(cls).params:
            texts.setdefault(field.arg_name, " ".join((field.description or "").split()))
    return texts


def refuse_others(
    given: Mapping[str, object], section: str, names: tuple[str, ...], why: str
) -> None:
    """Refuse settings that would have no effect: those that are not in ``names``."""
    for name, value in given.items():
        if name not in names:
            raise SettingsError(f"--{section}{name} {value} has no effect here: {why}")


@dataclass(kw_only=True)
class LoadsModels:
    """A command that loads a model, which may be from elsewhere, or trains on from one."""

    any_size: bool = False
    """Load a model even if it takes more memory than the machine has."""


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
