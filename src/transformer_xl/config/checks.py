"""Validation of settings: types, ranges, choices and names.

The annotation of a setting defines its type, choices and range. A settings class calls
:func:`check` first in its ``__post_init__``, so that values from Python, a file or the command line
are validated alike, and then :func:`require` for constraints between settings.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import operator
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from transformer_xl.errors import SettingsError

_LIMITS = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "above"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "below"),
}


class Range(NamedTuple):
    """The limits of a number, or of the length of a list."""

    ge: float | None = None
    """Inclusive lower bound."""
    gt: float | None = None
    """Exclusive lower bound."""
    le: float | None = None
    """Inclusive upper bound."""
    lt: float | None = None
    """Exclusive upper bound."""
    items: int | None = None
    """Maximum length of a list."""

    def holds(self, value: Any) -> bool:
        """Whether a value is within the limits."""
        if self.items is not None:
            return not isinstance(value, tuple) or len(value) <= self.items
        limits = zip(_LIMITS.values(), self, strict=False)
        return all(limit is None or compare(value, limit) for (compare, _), limit in limits)

    def described(self) -> str:
        """Return the limits of a number in words."""
        if self.ge is not None and self.le is not None:
            return f"between {self.ge} and {self.le}"
        limits = zip(_LIMITS.values(), self, strict=False)
        return " and ".join(f"{words} {x}" for (_, words), x in limits if x is not None)


Count = Annotated[int, Range(gt=0)]
Length = Annotated[int, Range(ge=0)]
Positive = Annotated[float, Range(gt=0)]
NotNegative = Annotated[float, Range(ge=0)]
Share = Annotated[float, Range(ge=0, le=1)]
Fraction = Annotated[float, Range(ge=0, lt=1)]

HIDDEN = types.MappingProxyType({"is_hidden": True})
"""Metadata of a field whose value must not appear in errors."""

_Settings = TypeVar("_Settings")
_Any = TypeVar("_Any")
_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a finite number",
    str: "a text",
    Path: "a path",
    types.NoneType: "None",
}
_BITS = 64
"""Maximum bits of an integer setting."""
_ITEMS = 1_000
"""Maximum items of a list that an error examines."""
_SHOWN = 100
"""Maximum characters of a value in an error."""


def no_type_check(checks_itself: _Any) -> _Any:
    """Mark a class or function that validates and converts its arguments itself.

    The type checks installed by the tests skip decorators of this name. That of the standard
    library would remove the annotations, which define the rules. A class is decorated with
    :func:`names_nearest`, too.
    """
    return names_nearest(checks_itself) if isinstance(checks_itself, type) else checks_itself


def names_nearest(called: _Any) -> _Any:
    """Let the TypeError of an unknown keyword argument name the most similar one.

    Decorates a function, or the ``__init__`` of a class. What takes any keyword is left as it is.
    """
    function: Any = called
    if isinstance(function, type):
        function.__init__ = names_nearest(function.__init__)
        return called
    known = inspect.signature(function).parameters
    if any(x.kind == x.VAR_KEYWORD for x in known.values()):
        return called

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        for name in given.keys() - known.keys():
            if nearest := near(name, known):
                raise TypeError(
                    f"{function.__qualname__}() got an unexpected keyword argument {name!r}: "
                    f"did you mean {nearest!r}?"
                )
        return function(*args, **given)

    return cast(_Any, call)


def require(holds: bool, message: str) -> None:
    """Raise a SettingsError unless a constraint holds."""
    if not holds:
        raise SettingsError(message)


class Unused(NamedTuple):
    """A setting without effect in combination with others, which must be left at its default."""

    name: str
    """The setting."""
    beside: str
    """The settings that make it ineffective."""
    part: str | None = None
    """The item of a list that has no effect. None: the setting as a whole."""


class ContradictionError(SettingsError):
    """Two settings contradict each other, and one of them has a value that suits the other.

    Attributes:
        settings: The settings.
        name: Name of the setting that can give way: of a recipe, it does where the other is given.
        value: A value with which it suits the other.
    """

    def __init__(self, message: str, settings: Any, name: str, value: Any) -> None:
        super().__init__(message)
        self.settings, self.name, self.value = settings, name, value


def require_fitting(settings: Any, holds: bool, message: str, **remedy: Any) -> None:
    """Raise a ContradictionError unless settings suit each other.

    Args:
        settings: The settings.
        holds: Whether they do.
        message: What contradicts what.
        remedy: The setting that can give way, with a value that suits the others.
    """
    if not holds:
        ((name, value),) = remedy.items()
        raise ContradictionError(message, settings, name, value)


class UnusedError(SettingsError):
    """A setting is given that has no effect."""

    settings: Any
    """The settings."""
    name: str
    """Name of the setting."""
    value: Any
    """The value that it must have."""


def refuse_unused(settings: Any, found: Iterable[Unused]) -> None:
    """Refuse settings without effect that are not at their defaults.

    Raises:
        UnusedError: There is one.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    for name, beside, part in found:
        value, allowed = getattr(settings, name), defaults[name]
        remedy = f"leave it at {allowed!r}"
        if part is not None:
            allowed, remedy = tuple(x for x in value if x != part), f"leave out {part!r}"
        if value != allowed:
            error = UnusedError(
                f"{name}={value!r} has no effect with {beside}; {remedy}, or change the other"
            )
            error.settings, error.name, error.value = settings, name, allowed
            raise error


def stored(kind: type[_Settings], values: Mapping[str, Any]) -> _Settings:
    """Create settings from stored values, without those that have no effect.

    Earlier versions accepted and stored such settings.

    Raises:
        SettingsError: A value is invalid.
    """
    given = dict(values)
    while True:
        try:
            return kind(**given)
        except UnusedError as error:
            if type(error.settings) is kind:
                given[error.name] = error.value
            else:
                section = next(name for name, x in given.items() if x is error.settings)
                given[section] = dataclasses.replace(error.settings, **{error.name: error.value})


def check(settings: Any, section: str = "") -> None:
    """Validate and convert each field of a dataclass, in its ``__post_init__``.

    Raises:
        SettingsError: As :func:`checked` does.
    """
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    for name, value in checked(type(settings), given, section).items():
        if value is not given[name]:
            object.__setattr__(settings, name, value)


def checked(kind: type, values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Validate values by the annotations of the settings of these names, and convert them.

    Lists become tuples, integers become floats where a float is declared, and NumPy and torch
    numbers become Python numbers.

    Args:
        kind: The class of the settings.
        values: Values of some of its settings.
        section: Prefix of the names of settings in errors.

    Raises:
        SettingsError: A value is of a wrong type, out of range or unknown.
    """
    rules, found = _rules(kind), {}
    for name, value in values.items():
        rule, is_hidden = rules[name]
        plain = _plain(value)
        try:
            found[name] = _converted(plain, rule)
        except _UnfitError:
            full = f"{section}.{name}" if section else name
            if is_hidden:
                raise SettingsError(f"{full} must be {_described(rule)}") from None
            # The beginning of a list that is too long is enough for the error.
            shown = plain[:_ITEMS] if isinstance(plain, tuple) else plain
            raise SettingsError(f"{full}={_shown(shown)} {_wrong(shown, rule)}") from None
    return found


def read_settings(
    kind: type[_Settings], values: Any, source: str, section: str = "", *, is_stored: bool = False
) -> _Settings:
    """Create settings from the parsed contents of a file.

    Args:
        kind: The settings class; its sections are dataclasses, too.
        values: The parsed contents.
        source: Name of the file in errors.
        section: Prefix of names in errors.
        is_stored: Whether to drop settings without effect, as :func:`stored` does.

    Raises:
        SettingsError: A name is unknown, a section is missing, or a value is invalid.
    """
    if not isinstance(values, Mapping):
        message = f"{section} is a section: write [{section}] and keys below it"
        raise SettingsError(f"{source}: {message}")
    fields: Any = {field.name: field for field in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    given = {}
    for key, value in values.items():
        name = f"{section}.{key}" if section else str(key)
        if key not in fields:
            nearest = near(str(key), fields)
            hint = f"did you mean {nearest}?" if nearest else f"there are {', '.join(fields)}"
            raise SettingsError(f"{source}: {name}: no such setting; {hint}")
        if dataclasses.is_dataclass(fields[key].type):
            value = read_settings(fields[key].type, value, source, name, is_stored=is_stored)
        given[key] = value
    for name, field in fields.items():
        if name not in given and field.default is field.default_factory is dataclasses.MISSING:
            raise SettingsError(f"{source}: the section [{name}] is missing")
    try:
        return stored(kind, given) if is_stored else kind(**given)
    except ValueError as error:
        is_named = not section or str(error).startswith(f"{section}.")
        raise SettingsError(f"{source}: {'' if is_named else f'{section}: '}{error}") from error


def near(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known word that is most similar, if any is similar enough, in any case."""
    words = {x.lower(): x for x in known}
    found = difflib.get_close_matches(word.lower(), words, 1, cutoff)
    return words[found[0]] if found else None


@functools.lru_cache(maxsize=64)
def _rules(kind: type) -> dict[str, tuple[Any, bool]]:
    """Return the annotation of each setting, and whether its value is hidden."""
    hints = get_type_hints(kind, include_extras=True)
    fields = dataclasses.fields(kind)
    return {field.name: (hints[field.name], "is_hidden" in field.metadata) for field in fields}


class _UnfitError(Exception):
    """A value does not satisfy a rule."""


def _converted(value: Any, rule: Any) -> Any:
    """Convert a value to the type of a rule.

    Raises:
        _UnfitError: The value does not satisfy the rule.
    """
    origin, parts = get_origin(rule), get_args(rule)
    if origin in (Union, types.UnionType):
        for part in parts:
            with suppress(_UnfitError):
                return _converted(value, part)
    elif origin is Annotated:
        base, limits = parts
        # A list that is too long is refused without converting its items.
        if limits.items is None or limits.holds(value):
            found = _converted(value, base)
            if limits.holds(found):
                return found
    elif origin is Literal:
        for word in parts:
            # In Python, True == 1.0 == 1.
            is_one = isinstance(value, type(word)) and not isinstance(value, bool)
            if is_one and value == word:
                return word
    elif origin is tuple:
        if isinstance(value, tuple):
            kinds = parts[:1] * len(value) if parts[1:] == (...,) else parts
            if len(kinds) == len(value):
                return tuple(map(_converted, value, kinds))
    elif rule is Path:
        if isinstance(value, str | Path):
            return Path(value)
    elif rule in (int, float):
        # 4.0 is no integer, as in TOML.
        is_number = isinstance(value, (int, rule)) and not isinstance(value, bool)
        if is_number and _is_countable(value):
            return rule(value)
    elif isinstance(value, origin or rule):
        return value
    raise _UnfitError


def _plain(value: Any) -> Any:
    """Convert NumPy and torch numbers to Python numbers, and lists to tuples."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return value
    # Most lists hold plain values only.
    return tuple(value) if {*map(type, value)} <= _NAMES.keys() else tuple(map(_plain, value))


def _is_countable(value: float) -> bool:
    """Whether a float is finite, or an integer has at most 64 bits."""
    return math.isfinite(value) if isinstance(value, float) else value.bit_length() <= _BITS


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:
        # Python refuses to format integers of more than some thousand digits.
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _wrong(value: Any, rule: Any) -> str:
    """Describe the rule that a value violates, with the most similar choice."""
    leaves, kinds, choices = [*_leaves(value)], _alternatives(rule), _choices(rule)
    if any(isinstance(leaf, int) and not _is_countable(leaf) for leaf in leaves):
        return f"must be below 2**{_BITS}"
    words = [*map(str, choices)]
    unknown = next((x for x in leaves if isinstance(x, str) and x not in words), "")
    nearest = near(unknown, words)
    hint = "" if nearest is None else f"; did you mean {nearest!r}?"
    may_be_none = types.NoneType in kinds
    if any(get_origin(kind) is Literal for kind in kinds):
        more = ["None"] if may_be_none else []
        return f"is unknown; choose from {', '.join([*map(repr, choices), *more])}{hint}"
    for base, limits in (get_args(kind) for kind in kinds if get_origin(kind) is Annotated):
        # If only the range is wrong, the type is omitted.
        if base in (int, float) and type(value) in (int, base) and _is_countable(value):
            return f"must be {limits.described()}{', or None' if may_be_none else ''}"
    return f"must be {_described(rule)}{hint}"


def _leaves(value: Any) -> Iterable[Any]:
    return (leaf for each in value for leaf in _leaves(each)) if type(value) is tuple else (value,)


def _alternatives(rule: Any) -> tuple[Any, ...]:
    return get_args(rule) if get_origin(rule) in (Union, types.UnionType) else (rule,)


def _choices(rule: Any) -> list[Any]:
    """Return all choices of a rule, also nested ones."""
    if get_origin(rule) is Literal:
        return [*get_args(rule)]
    return [word for part in get_args(rule) for word in _choices(part)]


def _described(rule: Any) -> str:
    kinds = _alternatives(rule)
    if len(kinds) > 1:
        return " or ".join(map(_described, kinds))
    origin, parts = get_origin(rule), get_args(rule)
    if origin is Annotated:
        base, limits = parts
        if limits.items is None:
            return f"{_described(base)} {limits.described()}"
        return f"a list of at most {limits.items:,} items, each {_described(get_args(base)[0])}"
    if origin is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if origin is tuple:
        if parts[1:] == (...,):
            return f"a list with each item {_described(parts[0])}"
        return f"a list of {', '.join(map(_described, parts))}"
    return _NAMES.get(rule, getattr(rule, "__name__", str(rule)))
