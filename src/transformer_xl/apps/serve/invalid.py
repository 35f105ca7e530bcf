"""Error responses to requests that do not fit their description: the field, its value, the rule."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformer_xl.apps.serve.errors import ApiError
from transformer_xl.config import rule_of
from transformer_xl.model import shown


def invalid(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error response.

    Args:
        errors: The errors of pydantic, with their ``type``, ``loc``, ``input`` and ``ctx``.
    """
    first = errors[0]
    context, place = first.get("ctx", {}), _place(first)
    if "param" in context:
        # A rule of several fields.
        return ApiError(400, first["msg"], first["type"], context["param"])
    if first["type"] == "json_invalid":
        # Its location is a character of the body instead of a field.
        message = f"the body is not valid JSON: {context['error']}, character {place}"
        return ApiError(400, message, "json_invalid")
    if first["type"] == "missing":
        message = f"{place or 'the body'} is missing: GET /openapi.json describes the request"
        return ApiError(400, message, "missing_required_parameter", place or None)
    if first["type"] == "extra_forbidden":
        message = f"{place!r} is no field: GET /openapi.json lists them"
        return ApiError(400, message, "unknown_parameter", place)
    # A field of several types has the errors of each: a broken rule is more specific than a type.
    related = [x for x in errors if x["loc"][:2] == first["loc"][:2]]
    broken = [x for x in related if not x["type"].endswith("_type")][:1]
    broken = broken or [x for x in related if _place(x) == place]
    place = _place(broken[0])
    message = f"{place or 'the body'}={shown(broken[0]['input'])} {rule_of(broken)}"
    return ApiError(400, message, "invalid_value", place or None)


def _place(error: Mapping[str, Any]) -> str:
    """Return the place of a value, without pydantic's names of types."""
    where, *path = error["loc"]
    if where == "header":
        # The validator has it in lower case.
        return str(path[0]).title()
    is_extra = error["type"] == "extra_forbidden"
    names = [
        str(x)
        for x in path
        if is_extra or (str(x).isidentifier() and x != "str") or str(x).isdecimal()
    ]
    return ".".join(names)
