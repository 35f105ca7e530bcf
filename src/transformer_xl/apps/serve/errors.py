"""What goes wrong, in the shape of OpenAI's errors: JSON for every status."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from transformer_xl.apps.serve.engine import QueueFullError
from transformer_xl.apps.serve.sessions import (
    NoRoomError,
    SessionBusyError,
    SessionError,
    SessionMissingError,
    TooManySessionsError,
)

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
RETRY_SECONDS = 1
"""After how long one may ask again."""


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: The status of HTTP.
        message: What is wrong, the rule, the remedy.
        code: A word for programs.
        param: The field that is wrong.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


# Made once: json.dumps makes one each time.
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def encoded(value: Any) -> bytes:
    """Return JSON in ASCII, in which a character that has no UTF-8 can be quoted, too."""
    return _ENCODER.encode(value).encode()


class JsonResponse(Response):
    """JSON, as :func:`encoded` writes it."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Write a value."""
        return encoded(content)


def content(error: ApiError) -> dict[str, Any]:
    """Return the JSON of an error."""
    fallback = "invalid_request_error" if error.status < 500 else "server_error"
    about = {
        "message": error.message,
        "type": _TYPES.get(error.status, fallback),
        "param": error.param,
        "code": error.code,
    }
    return {"error": about}


def response(error: ApiError, headers: Mapping[str, str] | None = None) -> JsonResponse:
    """Return the answer to a request that failed."""
    headers = dict(headers or {})
    if error.status in (429, 503):
        headers["Retry-After"] = str(RETRY_SECONDS)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JsonResponse(content(error), error.status, headers)


def of_session(error: Exception, name: str) -> ApiError:
    """Say why a session cannot be had."""
    if isinstance(error, SessionMissingError):
        return ApiError(404, str(error), "session_not_found", "session")
    if isinstance(error, SessionBusyError):
        return ApiError(409, f"{error}: wait until it has ended", "session_busy", "session")
    if isinstance(error, TooManySessionsError):
        return ApiError(429, f"{error}: delete one", "too_many_sessions", "session")
    if isinstance(error, NoRoomError):
        message = f"{error}: make room on the disk of the server, or delete sessions"
        return ApiError(507, message, "no_room", "session")
    if isinstance(error, SessionError):
        return ApiError(409, str(error), "session_not_saved", "session")
    if isinstance(error, ValueError):
        message = f"session {name!r} was made with another model: delete it, or take another name"
        return ApiError(409, message, "session_of_another_model", "session")
    if isinstance(error, RuntimeError):
        message = f"the file of session {name!r} is damaged: delete it, or restore it from a copy"
        return ApiError(500, message, "session_damaged", "session")
    return ApiError(500, f"session {name!r} cannot be read or written: see the log", "disk")


def add_handlers(app: FastAPI) -> None:
    """Answer every error in the same shape."""

    @app.exception_handler(ApiError)
    async def _known(request: Request, error: ApiError) -> Response:
        return response(error)

    @app.exception_handler(QueueFullError)
    async def _full(request: Request, error: QueueFullError) -> Response:
        return response(ApiError(429, "too many requests wait: try again later", "queue_full"))

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        where = place or str(first["loc"][0])
        message = f"{where}: {first['msg']}"
        status = 422
        if first["type"] == "json_invalid":
            # Its place is a character of the body, and no field.
            message = f"the body is no JSON: {first['ctx']['error']}, character {place}"
            status, place = 400, ""
        return response(ApiError(status, message, first["type"], place or None))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        phrase = HTTPStatus(error.status_code).phrase
        message = f"{request.method} {request.url.path}: {phrase}"
        if error.detail and error.detail != phrase:
            message += f": {error.detail}"
        if error.status_code in (404, 405):
            message += "; GET /openapi.json lists what there is"
        code = phrase.lower().replace(" ", "_")
        return response(ApiError(error.status_code, message, code), error.headers)

    @app.exception_handler(Exception)
    async def _fault(request: Request, error: Exception) -> Response:
        return response(ApiError(500, "the server failed: see its log", "internal_error"))
