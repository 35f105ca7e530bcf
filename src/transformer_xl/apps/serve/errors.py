"""Errors in OpenAI's format: JSON for every status."""

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
    SessionBusyError,
    SessionError,
    SessionMissingError,
    StorageFullError,
    TooManySessionsError,
)

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
_OF_SESSION = {
    SessionMissingError: (404, "", "session_not_found"),
    SessionBusyError: (409, ": wait until it has ended", "session_busy"),
    TooManySessionsError: (429, ": delete one", "too_many_sessions"),
    StorageFullError: (
        507,
        ": free space on the disk of the server, or delete sessions",
        "no_room",
    ),
    SessionError: (409, "", "session_not_saved"),
}
RETRY_SECONDS = 1
"""Value of the header Retry-After."""


class ApiError(Exception):
    """An error response.

    The message has the value, the rule and the remedy; ``code`` is for programs, ``param`` is the
    invalid field.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


# Created once: json.dumps with options creates an encoder for each call.
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def encoded(value: Any) -> bytes:
    """Return JSON in ASCII, which can also hold lone surrogates."""
    return _ENCODER.encode(value).encode()


class JsonResponse(Response):
    """JSON, as :func:`encoded` writes it."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode a value."""
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
    """Return the response to a request that failed."""
    headers = dict(headers or {})
    if error.status in (429, 503):
        headers["Retry-After"] = str(RETRY_SECONDS)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JsonResponse(content(error), error.status, headers)


def of_session(error: Exception, name: str) -> ApiError:
    """Return the response for an error of a session."""
    if isinstance(error, SessionError):
        status, remedy, code = _OF_SESSION[type(error)]
        return ApiError(status, f"{error}{remedy}", code, "session")
    if isinstance(error, ValueError):
        message = f"session {name!r} was made with another model: delete it, or take another name"
        return ApiError(409, message, "session_of_another_model", "session")
    if isinstance(error, RuntimeError):
        message = f"the file of session {name!r} is damaged: delete it, or restore it from a copy"
        return ApiError(500, message, "session_damaged", "session")
    return ApiError(500, f"session {name!r} cannot be read or written: see the log", "disk")


def add_handlers(app: FastAPI) -> None:
    """Return every error in the same format."""

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
            # Its location is a character of the body instead of a field.
            message = f"the body is not valid JSON: {first['ctx']['error']}, character {place}"
            status, place = 400, ""
        return response(ApiError(status, message, first["type"], place or None))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        phrase = HTTPStatus(error.status_code).phrase
        message = f"{request.method} {request.url.path}: {phrase}"
        if error.detail and error.detail != phrase:
            message += f": {error.detail}"
        if error.status_code in (404, 405):
            message += "; GET /openapi.json lists the endpoints"
        code = phrase.lower().replace(" ", "_")
        return response(ApiError(error.status_code, message, code), error.headers)

    @app.exception_handler(Exception)
    async def _fault(request: Request, error: Exception) -> Response:
        return response(ApiError(500, "the server failed: see its log", "internal_error"))
