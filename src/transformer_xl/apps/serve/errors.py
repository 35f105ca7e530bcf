"""Errors of the server, each with the status and the code that a client receives."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformer_xl.config import rule_of
from transformer_xl.errors import InputError, TxlError
from transformer_xl.model import shown

_NOT_STARTED = {
    "queue_full": (429, "too many requests wait: try again later"),
    "late": (503, "the request waited longer than its time limit: try again later"),
    "stopping": (503, "the server is stopping: ask another one"),
}
_OF_FILES: dict[type[Exception], tuple[int, str, str]] = {
    InputError: (409, "session_of_another_model", "belongs to another model: take another name"),
    TxlError: (409, "session_damaged", "is damaged: delete it, or restore it from a copy"),
    OSError: (503, "disk", "cannot be read or written: see the log"),
}
"""Errors of the files of sessions, the first kind first."""


class ApiError(TxlError):
    """An error response.

    The message has the value, the rule and the remedy; ``code`` is for programs, ``param`` is the
    invalid field.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


class NotStartedError(ApiError):
    """No token of a request is generated: ``queue_full``, ``late`` or ``stopping``."""

    def __init__(self, code: str) -> None:
        super().__init__(*_NOT_STARTED[code], code)


class SessionError(ApiError):
    """A session is not available; the ``code`` says why."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(status, message, code, "session")


def session_error(error: Exception, name: str) -> SessionError:
    """Return the error response where a stored session cannot be read or written."""
    if isinstance(error, SessionError):
        return error
    status, code, message = next(x for kind, x in _OF_FILES.items() if isinstance(error, kind))
    return SessionError(status, code, f"the file of session {name!r} {message}")


def invalid(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error response to a request that does not fit its description.

    Args:
        errors: The errors of pydantic, with their ``type``, ``loc``, ``input`` and ``ctx``.
    """
    first = errors[0]
    context, place = first.get("ctx", {}), _place(first)
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
