"""Validation of settings: types, ranges, choices and names.

The annotation of a setting defines its type, choices and range. A settings class calls
:func:`check` first in its ``__post_init__``, so that values from Python, a file or the command line
are validated alike, and then :func:`require` for constraints between settings.
"""

import dataclasses
import difflib
import math
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)


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
        if isinstance(value, tuple):
            return self.items is None or len(value) <= self.items
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )


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
_PLAIN = {*_NAMES}
_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_BITS = 64
"""Maximum bits of an integer setting."""
_ITEMS = 1_000
"""Maximum items of a list that an error examines."""
_SHOWN = 100
"""Maximum characters of a value in an error."""


def no_type_check(checks_itself: _Any) -> _Any:
    """Mark a class or function that validates and converts its arguments itself.

    The type checks installed by the tests skip decorators of this name. That of the standard
    library would remove the annotations, which define the rules.
    """
    return checks_itself


def require(holds: bool, message: str) -> None:
    """Raise a ValueError unless a constraint holds."""
    if not holds:
        raise ValueError(message)


def check(settings: Any, section: str = "") -> None:
    """Validate each field of a dataclass by its annotation, and convert it.

    Lists become tuples, integers become floats where a float is declared, and NumPy and torch
    numbers become Python numbers.

    Args:
        settings: An instance, in its ``__post_init__``.
        section: Prefix of the names of settings in errors.

    Raises:
        ValueError: A value is of a wrong type, out of range or unknown.
    """
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    for name, value in checked(type(settings), given, section).items():
        if value is not given[name]:
            object.__setattr__(settings, name, value)


def check_word(name: str, word: str, kind: type, key: str) -> None:
    """Validate a command line argument before it is parsed.

    Lists and None are left to the parser.

    Args:
        name: Name of the option.
        word: The argument.
        kind: The settings class.
        key: Name of the setting in the class.

    Raises:
        ValueError: The argument is none of the choices, or no number where one is required.
    """
    rule = _rules(kind).get(key, (str,))[0]
    kinds = [get_args(x)[0] if get_origin(x) is Annotated else x for x in _alternatives(rule)]
    is_open = any(get_origin(x) is tuple or x in (str, Path) for x in kinds)
    if not (is_open or word == "None" or word in map(str, _words(rule))):
        check_value(name, _number(word), rule)


def checked(kind: type, values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return values as the settings of a class that have their names would be.

    Args:
        kind: The class.
        values: Values of some of its settings.
        section: What stands before their names in errors.

    Raises:
        ValueError: A value is of a wrong type, out of range or unknown.
    """
    rules, found = _rules(kind), {}
    for name, value in values.items():
        rule, is_hidden = rules[name]
        full = f"{section}.{name}" if section else name
        found[name] = check_value(full, value, rule, is_hidden=is_hidden)
    return found


def check_value(name: str, value: Any, rule: Any, *, is_hidden: bool = False) -> Any:
    """Convert a value to the type of an annotation.

    Args:
        name: Name of the setting.
        value: The value.
        rule: The annotation.
        is_hidden: Whether the value is omitted from errors.

    Raises:
        ValueError: It is of a wrong type, out of range or unknown.
    """
    plain = _plain(value)
    with suppress(_UnfitError):
        return _taken(plain, rule)
    if isinstance(plain, tuple):
        # The beginning of a list that is too long is enough for the error.
        plain = plain[:_ITEMS]
    if is_hidden:
        raise ValueError(f"{name} must be {_described(rule)}")
    raise ValueError(f"{name}={_shown(plain)} {_wrong(plain, rule)}")


def read_settings(kind: type[_Settings], values: Any, source: str, section: str = "") -> _Settings:
    """Create settings from the parsed contents of a file.

    Args:
        kind: The settings class; its sections are dataclasses, too.
        values: The parsed contents.
        source: Name of the file in errors.
        section: Prefix of names in errors.

    Raises:
        ValueError: A name is unknown, a section is missing, or a value is invalid.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{source}: {section} is a section: write [{section}] and keys below it")
    fields: Any = {field.name: field for field in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    given = {}
    for key, value in values.items():
        name = f"{section}.{key}" if section else str(key)
        if key not in fields:
            nearest = near(str(key), fields)
            hint = f"did you mean {nearest}?" if nearest else f"there are {', '.join(fields)}"
            raise ValueError(f"{source}: {name}: no such setting; {hint}")
        is_section = dataclasses.is_dataclass(fields[key].type)
        given[key] = read_settings(fields[key].type, value, source, name) if is_section else value
    for name, field in fields.items():
        missing = dataclasses.MISSING
        if name not in given and field.default is missing and field.default_factory is missing:
            raise ValueError(f"{source}: the section [{name}] is missing")
    try:
        return kind(**given)
    except ValueError as error:
        is_named = not section or str(error).startswith(f"{section}.")
        raise ValueError(f"{source}: {'' if is_named else f'{section}: '}{error}") from error


def near(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most similar, if any is similar enough."""
    return next(iter(difflib.get_close_matches(word, list(known), 1)), None)


@lru_cache(maxsize=64)
def _rules(kind: type) -> dict[str, tuple[Any, bool]]:
    hints = get_type_hints(kind, include_extras=True)
    return {
        field.name: (hints[field.name], "is_hidden" in field.metadata)
        for field in dataclasses.fields(kind)
    }


class _UnfitError(Exception):
    """A value does not satisfy a rule."""


def _taken(value: Any, rule: Any) -> Any:
    """Convert a value to the type of a rule."""
    origin, parts = get_origin(rule), get_args(rule)
    if origin in (Union, types.UnionType):
        for part in parts:
            with suppress(_UnfitError):
                return _taken(value, part)
    elif origin is Annotated:
        # A list that is too long is refused without converting its items.
        is_long = isinstance(value, tuple) and not parts[1].holds(value)
        found = None if is_long else _taken(value, parts[0])
        if not is_long and parts[1].holds(found):
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
                return tuple(map(_taken, value, kinds))
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
    return tuple(value) if {*map(type, value)} <= _PLAIN else tuple(map(_plain, value))


def _number(word: str) -> Any:
    """Parse a command line argument as a number or bool; return it unchanged if it is neither."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return {"True": True, "False": False}.get(word, word)


def _leaves(value: Any) -> Iterable[Any]:
    return (leaf for each in value for leaf in _leaves(each)) if type(value) is tuple else (value,)


def _is_countable(value: Any) -> bool:
    """Whether a float is finite, or an integer has at most 64 bits."""
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or value.bit_length() <= _BITS


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:
        # Python refuses to format integers of more than some thousand digits.
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _wrong(value: Any, rule: Any) -> str:
    """Describe the rule that a value violates, with the most similar choice."""
    leaves, kinds = [*_leaves(value)], _alternatives(rule)
    if any(isinstance(leaf, int) and leaf.bit_length() > _BITS for leaf in leaves):
        return f"must be below 2**{_BITS}"
    words = [str(word) for word in _words(rule)]
    strange = next((x for x in leaves if isinstance(x, str) and x not in words), "")
    nearest = near(strange, words)
    hint = "" if nearest is None else f"; did you mean {nearest!r}?"
    if any(get_origin(kind) is Literal for kind in kinds):
        more = ["None"] if types.NoneType in kinds else []
        return f"is unknown; choose from {', '.join([*map(repr, _words(rule)), *more])}{hint}"
    for kind in kinds:
        # If only the range is wrong, the type is omitted.
        base = get_args(kind)[0] if get_origin(kind) is Annotated else None
        is_one = type(value) is base or (base is float and type(value) is int)
        if base in (int, float) and is_one and _is_countable(value):
            return f"must be {_range(kind)}{', or None' if types.NoneType in kinds else ''}"
    return f"must be {_described(rule)}{hint}"


def _alternatives(rule: Any) -> tuple[Any, ...]:
    return get_args(rule) if get_origin(rule) in (Union, types.UnionType) else (rule,)


def _words(rule: Any) -> list[Any]:
    """Return all choices of a rule, also nested ones."""
    if get_origin(rule) is Literal:
        return [*get_args(rule)]
    return [word for part in get_args(rule) for word in _words(part)]


def _described(rule: Any) -> str:
    kinds = _alternatives(rule)
    if len(kinds) > 1:
        return " or ".join(map(_described, kinds))
    origin, parts = get_origin(rule), get_args(rule)
    if origin is Annotated and get_origin(parts[0]) is tuple:
        item = _described(get_args(parts[0])[0])
        return f"a list of at most {parts[1].items:,} items, each {item}"
    if origin is Annotated:
        return f"{_described(parts[0])} {_range(rule)}"
    if origin is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if origin is tuple:
        if parts[1:] == (...,):
            return f"a list with each item {_described(parts[0])}"
        return f"a list of {', '.join(map(_described, parts))}"
    return _NAMES.get(rule, getattr(rule, "__name__", str(rule)))


def _range(rule: Any) -> str:
    """Describe the limits of an annotation."""
    meta = get_args(rule)[1]
    found = {key: x for key in _LIMITS if (x := getattr(meta, key)) is not None}
    if found.keys() == {"ge", "le"}:
        return f"between {found['ge']} and {found['le']}"
    return " and ".join(f"{_LIMITS[key]} {x}" for key, x in found.items())
