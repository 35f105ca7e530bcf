"""What is wrong with a request, in words: the field, its value, the rule and the remedy."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformer_xl.apps.serve.errors import ApiError
from transformer_xl.apps.serve.repeats import KEY
from transformer_xl.apps.serve.schemas import ChatRequest, CompletionRequest
from transformer_xl.apps.serve.session_store import NAME
from transformer_xl.config import near
from transformer_xl.model import shown

_KINDS = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "string": "a text",
    "list": "a list",
    "dict": "an object",
    "model": "an object",
}
"""Types of JSON by the first word of the validator's name of the error."""
_RULES = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "int_parsing_size": "must be an integer of at most 64 bits",
    "string_too_short": "must have at least {min_length} characters: give more, or leave it out",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "literal_error": "must be {expected}",
    "string_unicode": "has half of a surrogate pair, which is no text: remove it",
    "half_of_a_pair": "has {half} at character {place}, half of a surrogate pair and no text: "
    "remove it, or send the whole character",
    "string_pattern_mismatch": "must be {pattern}",
}
"""What a value must be, by the validator's name of the rule and with its limits."""
_PATTERNS = {
    NAME: "a name of 1 to 64 letters, digits, dots, dashes and underscores that begins with a "
    "letter or digit",
    KEY: "1 to 255 printable ASCII characters without spaces",
}
"""Patterns in words."""
_CHOICES = {
    "prompt": "a text, a list of texts, a list of tokens, or a list of such lists",
    "stop": "a text or a list of texts, each of 1 to 256 characters",
    "content": "a text, or a list of parts {'type': 'text', 'text': ...}",
}
"""What a field of several types must be."""
_UNSUPPORTED = ("suffix", "logit_bias", "tools", "functions", "response_format", "modalities")
_FIELDS = {
    "/v1/completions": {*CompletionRequest.model_fields},
    "/v1/chat/completions": {*ChatRequest.model_fields},
}
"""The fields of a request by its address."""


def invalid(errors: Sequence[Mapping[str, Any]], address: str) -> ApiError:
    """Return the error response to a request that does not fit its description.

    Args:
        errors: What the validator errors, with its ``type``, ``loc``, ``input`` and ``ctx``.
        address: The address of the request, such as ``/v1/completions``.
    """
    first = errors[0]
    where, *path = first["loc"]
    if "param" in first.get("ctx", ()):
        # A rule of several fields.
        return ApiError(400, first["msg"], first["type"], first["ctx"]["param"])
    if first["type"] == "json_invalid":
        # Its location is a character of the body instead of a field.
        reason = first["ctx"]["error"]
        message = f"the body is not valid JSON: {reason}, character {path[0]}"
        return ApiError(400, message, "json_invalid")
    if not path:
        what = "is missing" if first["type"] == "missing" else f"is {shown(first['input'])}"
        message = f"the {where} {what}: send a JSON object, as GET /openapi.json describes it"
        return ApiError(400, message, "invalid_type")
    place = _place(first)
    if first["type"] == "missing":
        message = f"{place} is missing: a request needs it"
        return ApiError(400, message, "missing_required_parameter", place)
    # Before unknown fields: those of both kinds of request are named here.
    if path[0] in _UNSUPPORTED:
        message = f"{path[0]} is not supported by this server: leave it out"
        return ApiError(400, message, "unsupported_parameter", path[0])
    if first["type"] == "extra_forbidden":
        hint = _hint(path, address)
        return ApiError(400, f"{place!r} is no field; {hint}", "unknown_parameter", place)
    # A field of several types has the errors of each.
    beside = [each for each in errors if each["loc"][0] == where]
    same = [each for each in beside if f"{_place(each)}.".startswith(f"{place}.")]
    specific = next((each for each in same if each["type"] in _RULES), None)
    if specific is not None:
        limits = specific.get("ctx", {}).items()
        words = {k: f"{x:g}" if isinstance(x, float) else _PATTERNS.get(x, x) for k, x in limits}
        place, code = _place(specific), "invalid_value"
        rule, value = _RULES[specific["type"]].format(**words), specific["input"]
    else:
        kind = _KINDS.get(first["type"].partition("_")[0], "as GET /openapi.json describes it")
        if len(same) > 1:
            kind = _CHOICES.get(place.rpartition(".")[2], kind)
        rule, value, code = f"must be {kind}", first["input"], "invalid_type"
    return ApiError(400, f"{place}={shown(value)} {rule}", code, place)


def _hint(path: Sequence[Any], address: str) -> str:
    """Return what to do about a field that a request to this address does not have."""
    if len(path) == 1:
        for other, fields in _FIELDS.items():
            if path[0] in fields:
                return f"only {other} has it: leave it out"
        if nearest := near(str(path[0]), _FIELDS.get(address, ())):
            return f"did you mean {nearest}?"
    return "GET /openapi.json lists them"


def _place(error: Mapping[str, Any]) -> str:
    """Return the place of a value, without the validator's names of types."""
    where, *path = error["loc"]
    if where == "header":
        # The validator has it in lower case.
        return str(path[0]).title()
    # A field that does not exist may have any name.
    last = len(path) - 1 if error["type"] == "extra_forbidden" else None
    is_field = [isinstance(x, int) or (x.isidentifier() and x != "str") for x in path]
    return ".".join(str(x) for n, x in enumerate(path) if is_field[n] or n == last)
