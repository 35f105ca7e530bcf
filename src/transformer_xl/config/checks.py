"""Validation of settings: types, ranges, choices and names, by pydantic.

The annotation of a setting defines its type, choices and range. A settings class calls
:func:`check` first in its ``__post_init__``, so that values from Python, a file or the command line
are validated alike, and then :func:`require` for constraints between settings.
"""

import dataclasses
import difflib
import functools
import types
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from annotated_types import Interval, Len
from typing_extensions import TypedDict

from transformer_xl.config.gone import without_gone
from transformer_xl.errors import SettingsError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_LIMIT = 2**64
"""Above all integers that files and tensors hold."""

Count = Annotated[int, Interval(gt=0, lt=_LIMIT)]
Length = Annotated[int, Interval(ge=0, lt=_LIMIT)]
Integer = Annotated[int, Interval(gt=-_LIMIT, lt=_LIMIT)]
Positive = Annotated[float, Interval(gt=0)]
NotNegative = Annotated[float, Interval(ge=0)]
Share = Annotated[float, Interval(ge=0, le=1)]
Fraction = Annotated[float, Interval(ge=0, lt=1)]
Range = Interval
Items = Len

_Settings = TypeVar("_Settings")
RULES = {
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "finite_number": "a finite number",
    "literal_error": "{expected}",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "tuple_type": "a list",
    "too_long": "a list of at most {max_length:,} items",
    "missing": "a list of more items",
    "too_short": "a list of at least {min_length:,} items",
    "list_type": "a list",
    "dict_type": "an object",
    "model_attributes_type": "an object",
    "string_too_short": "a text of at least {min_length} characters",
    "string_too_long": "a text of at most {max_length} characters",
    "string_pattern_mismatch": "a text that matches {pattern}",
    "string_unicode": "a text, and half of a surrogate pair is none",
    "is_instance_of": "a {class}",
    "dataclass_exact_type": "{class_name}",
}
"""What a value must be, by pydantic's name of the error and with its limits."""
_SHOWN = 100
"""Maximum characters of a value in an error."""


def require(holds: bool, message: str, settings: object = None, **remedy: object) -> None:
    """Raise a SettingsError unless a constraint holds.

    Args:
        holds: Whether it does.
        message: What contradicts what.
        settings: Settings of which one can give way, for a ContradictionError.
        remedy: That one, with a value that suits the others.
    """
    if not holds and remedy:
        ((name, value),) = remedy.items()
        raise ContradictionError(message, settings, name, value)
    if not holds:
        raise SettingsError(message)


class ContradictionError(SettingsError):
    """Two settings contradict each other, and one of them has a value that suits the other.

    Attributes:
        settings: The settings.
        name: Name of the setting that can give way: of a recipe, it does where the other is given.
        value: A value with which it suits the other.
    """

    def __init__(self, message: str, settings: Any, name: str, value: object) -> None:
        super().__init__(message)
        self.settings, self.name, self.value = settings, name, value


class UnusedError(ContradictionError):
    """A setting has no effect beside another one."""


class Unused(NamedTuple):
    """A setting without effect in combination with others, which must be left at its default."""

    name: str
    """The setting."""
    beside: str
    """The settings that make it ineffective."""
    part: str | None = None
    """The item of a list that has no effect. None: the setting as a whole."""


def refuse_unused(settings: object, unused: Iterable[Unused]) -> None:
    """Raise an UnusedError if a setting without effect is not at its default."""
    known = fields_of(type(settings))
    for name, beside, part in unused:
        if name not in known:
            continue
        value, allowed = getattr(settings, name), known[name].default
        remedy = f"leave it at {allowed!r}"
        if part is not None:
            allowed, remedy = tuple(x for x in value if x != part), f"leave out {part!r}"
        if value != allowed:
            message = f"{name}={value!r} has no effect with {beside}; {remedy}, or change the other"
            raise UnusedError(message, settings, name, allowed)


def create_from_stored(
    settings_class: type[_Settings], values: Mapping[str, object], keep: Container[str] = ()
) -> _Settings:
    """Return settings from stored values, without those that have no effect.

    Earlier versions accepted and stored such settings.

    Args:
        settings_class: The class of the settings.
        values: Values by the names of the settings; sections are settings themselves.
        keep: Names of settings that must have an effect.

    Raises:
        SettingsError: A value is invalid.
    """
    values = dict(values)
    while True:
        try:
            return settings_class(**values)
        except UnusedError as error:
            if error.name in keep:
                raise
            section = next((name for name, x in values.items() if x is error.settings), None)
            if section is None:
                values[error.name] = error.value
            else:
                values[section] = dataclasses.replace(error.settings, **{error.name: error.value})


def check(settings: Any, section: str = "") -> None:
    """Validate and convert each field of a dataclass, in its ``__post_init__``.

    The value of a field with the metadata ``{"is_hidden": True}`` does not appear in errors.

    Raises:
        SettingsError: A value is of a wrong type or out of range.
    """
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    for name, value in validate_settings(type(settings), values, section).items():
        if value is not values[name]:
            object.__setattr__(settings, name, value)


def validate_settings(
    settings_class: type, values: Mapping[str, object], section: str = ""
) -> dict[str, Any]:
    """Validate and convert values of some settings of a class, by the annotations of its fields.

    Lists become tuples, integers become floats where a float is declared, and NumPy and torch
    numbers become Python numbers. Constraints between settings are not checked.

    Args:
        settings_class: The class of the settings.
        values: Values by the names of the settings.
        section: Section of the settings, which precedes their names in errors.

    Returns:
        The converted values, by the same names.

    Raises:
        SettingsError: There is no such setting, or a value is of a wrong type or out of range.
    """
    from pydantic import ValidationError

    known = fields_of(settings_class)
    for name in values:
        if name not in known:
            raise SettingsError(_describe_unknown_setting(name, known, section))
    values = {name: plain(value) for name, value in values.items()}
    try:
        return _validator(settings_class).validate_python(values)
    except ValidationError as error:
        # The branches of a union have an error each.
        name = str(error.errors(include_url=False)[0]["loc"][0])
        details = [x for x in error.errors(include_url=False) if x["loc"][0] == name]
    path = f"{section}.{name}" if section else name
    rule = rule_of(details)
    if "is_hidden" in known[name].metadata:
        raise SettingsError(f"{path} {rule}")
    value, choices = details[-1]["input"], _words(known[name].type)
    nearest = near(value, choices) if isinstance(value, str) else None
    hint = f"; did you mean {nearest!r}?" if nearest else ""
    indices = "".join(f"[{x}]" for x in details[-1]["loc"] if isinstance(x, int))
    raise SettingsError(f"{path}{indices}={_shown(value)} {rule}{hint}")


def _describe_unknown_setting(name: str, known: Iterable[str], section: str) -> str:
    """Return the message for a name that is not one of a class, with the most similar one."""
    nearest = near(name, known)
    hint = f"did you mean {nearest}?" if nearest else f"there are {', '.join(known)}"
    path = f"{section}.{name}" if section else name
    return f"{path}: no such setting; {hint}"


def rule_of(errors: Iterable[Mapping[str, Any]]) -> str:
    """Return what a value must be, from pydantic's errors: a union has one for each branch."""
    rules = [RULES.get(x["type"], "{msg}").format(msg=x["msg"], **_limits(x)) for x in errors]
    return f"must be {' or '.join(dict.fromkeys(rules))}"


def read_settings(
    settings_class: type[_Settings],
    values: object,
    source: str,
    section: str = "",
    *,
    is_stored: bool = False,
) -> _Settings:
    """Create settings from the parsed contents of a file.

    Args:
        settings_class: The settings class; its sections are dataclasses, too.
        values: The parsed contents.
        source: Name of the file in errors.
        section: Prefix of names in errors.
        is_stored: Whether to drop settings without effect, as :func:`create_from_stored` does.

    Raises:
        SettingsError: A name is unknown, a section is missing, or a value is invalid.
    """
    try:
        return _read_section(settings_class, values, section, is_stored=is_stored)
    except ValueError as error:
        raise SettingsError(f"{source}: {error}") from error


def _read_section(
    settings_class: type[_Settings], values: object, section: str, *, is_stored: bool
) -> _Settings:
    """Create settings as :func:`read_settings` does, with errors that do not name the file."""
    if not isinstance(values, Mapping):
        raise SettingsError(f"{section} is a section: write [{section}] and keys below it")
    settings, fields = without_gone(values, section), fields_of(settings_class)
    for name in settings:
        if name not in fields:
            raise SettingsError(_describe_unknown_setting(name, fields, section))
    for name, field in fields.items():
        if isinstance(kind := field.type, type) and dataclasses.is_dataclass(kind):
            if name in settings:
                settings[name] = _read_section(kind, settings[name], name, is_stored=is_stored)
            elif field.default_factory is dataclasses.MISSING:
                raise SettingsError(f"the section [{name}] is missing")
    try:
        if is_stored:
            return create_from_stored(settings_class, settings)
        return settings_class(**settings)
    except ValueError as error:
        if not section or str(error).startswith(f"{section}."):
            raise
        raise SettingsError(f"{section}: {error}") from error


def near(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known word that is most similar, if any is similar enough, in any case."""
    words = {x.lower(): x for x in known}
    matches = difflib.get_close_matches(word.lower(), words, 1, cutoff)
    return words[matches[0]] if matches else None


@functools.cache
def fields_of(settings_class: type) -> "dict[str, dataclasses.Field[object]]":
    """Return the settings of a class by name; those of all its kinds, if it has ``classes()``."""
    every = getattr(settings_class, "classes", lambda: (settings_class,))()
    return {x.name: x for each in reversed(every) for x in dataclasses.fields(each)}


@functools.cache
def _validator(settings_class: type) -> "TypeAdapter[dict[str, Any]]":
    """Return what validates some of the fields of a settings class."""
    from pydantic import ConfigDict, TypeAdapter

    rules = {name: _with_paths(x.type) for name, x in fields_of(settings_class).items()}
    partial: Any = TypedDict(settings_class.__name__, rules, total=False)  # pyright: ignore[reportArgumentType]
    partial.__pydantic_config__ = ConfigDict(
        strict=True, allow_inf_nan=False, arbitrary_types_allowed=True
    )
    return TypeAdapter(partial)


def _with_paths(rule: object) -> object:
    """Let a path be a text, too; otherwise nothing is converted to another type."""
    from pydantic import Strict

    if get_origin(rule) in (Union, types.UnionType):
        return Union[tuple(map(_with_paths, get_args(rule)))]  # noqa: UP007  (of a tuple)
    return Annotated[Path, Strict(False)] if rule is Path else rule


def plain(value: object) -> object:
    """Convert NumPy and torch numbers to Python numbers, and lists to tuples."""
    if callable(to_list := getattr(value, "tolist", None)):
        value = to_list()
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


def _words(rule: object) -> list[str]:
    """Return the words that a setting can be chosen from."""
    return [
        word
        for part in get_args(rule)
        for word in ([part] if isinstance(part, str) else _words(part))
    ]


def _limits(error: Mapping[str, Any]) -> dict[str, object]:
    """Return the limits of a rule by pydantic's names, as an error shows them."""
    limits = error.get("ctx", {})
    words: dict[str, object] = {
        name: f"{x:g}" if isinstance(x, float) else x for name, x in limits.items()
    }
    return words | {name: "2**64" for name, x in limits.items() if x == _LIMIT}


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:
        # Python refuses to format integers of more than some thousand digits.
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
