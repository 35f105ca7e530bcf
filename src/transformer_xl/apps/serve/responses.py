"""Responses in JSON; errors of every kind in OpenAI's format."""

import json
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from transformer_xl.apps.serve.errors import ApiError, invalid
from transformer_xl.errors import TxlError

_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    # The unread rest of the body would be parsed as the next request.
    413: {"Connection": "close"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}


class JsonResponse(JSONResponse):
    """JSON in ASCII, which can also hold half of a surrogate pair, as of an unknown field."""

    def render(self, content: object) -> bytes:
        """Encode a value."""
        return json.dumps(content).encode()


def error_content(error: ApiError) -> dict[str, object]:
    """Return the JSON of an error."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    about = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": about}


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> JsonResponse:
    """Return the response to a request that failed."""
    headers = {**(headers or {}), **_HEADERS.get(error.status, {})}
    return JsonResponse(error_content(error), error.status, headers)


def add_handlers(app: FastAPI) -> None:
    """Return every error in the same format."""

    @app.exception_handler(TxlError)
    async def _known(request: Request, error: TxlError) -> Response:
        if not isinstance(error, ApiError):
            # A setting that contradicts another one, or has no effect.
            message = str(error).removeprefix("generate.")
            error = ApiError(400, message, "invalid_value", message.partition("=")[0])
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(invalid(error.errors()))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        phrase = HTTPStatus(error.status_code).phrase
        message = f"{request.method} {request.scope['path']}: {phrase}"
        if error.detail and error.detail != phrase:
            message += f": {error.detail}"
        if error.status_code in (404, 405):
            message += "; GET /openapi.json lists the endpoints"
        code = phrase.lower().replace(" ", "_")
        return error_response(ApiError(error.status_code, message, code), error.headers)

    @app.exception_handler(Exception)
    async def _fault(request: Request, error: Exception) -> Response:
        return error_response(ApiError(500, "the server failed: see its log", "internal_error"))
