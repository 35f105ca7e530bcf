"""What every request passes: who may ask, how much it may send; and what is written of it."""

import asyncio
import hmac
import logging
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transformer_xl.apps.serve.errors import ApiError, response
from transformer_xl.apps.serve.service import Service

log = logging.getLogger("transformer_xl.serve")

_LOCAL = ("localhost", "127.0.0.1", "::1")
_OPEN = ("/", "/openapi.json", "/health", "/health/live", "/health/ready")
"""What needs no key: nothing of it tells what others wrote."""
_BODY_SECONDS = 30.0
"""How long a client may take to send its request."""
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Guard:
    """Refuses what may not pass, and counts and logs all requests.

    A server that listens on this machine alone answers only to the machine's own names: else a
    page of another host could point its name here, and a browser would let it read everything.

    Args:
        app: What answers.
        service: The server.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        host = service.settings.host
        names = {name.lower() for name in service.settings.names}
        self._hosts = {*_LOCAL, *names} if host in _LOCAL else None
        key = service.settings.api_key
        self._key = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        try:
            try:
                body = await self._checked(scope, receive)
            except ApiError as error:
                # What was not read would be taken for the next request.
                close = {"Connection": "close"} if error.status in (408, 413) else None
                await response(error, close)(scope, receive, sending)
            else:
                await self._app(scope, _replayed(body, receive), sending)
        finally:
            self._record(scope, status, time.perf_counter() - started)

    async def _checked(self, scope: Scope, receive: Receive) -> bytes:
        """Return the body of a request that may pass.

        Raises:
            ApiError: It may not.
        """
        headers = Headers(scope=scope)
        if self._hosts is not None and _host(headers.get("host", "")) not in self._hosts:
            raise ApiError(
                421, "this server answers to localhost alone: see --names", "misdirected"
            )
        given = headers.get("authorization", "").encode("latin-1")
        if self._key is not None and scope["path"] not in _OPEN:
            scheme, _, rest = given.partition(b" ")
            given = scheme.lower().capitalize() + b" " + rest
            if not hmac.compare_digest(given, self._key):
                message = "the API key is missing or wrong: send Authorization: Bearer KEY"
                raise ApiError(401, message, "invalid_api_key")
        body = await self._body(headers, receive)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if body and kind != "application/json":
            # Which a page of another host cannot send without asking first.
            message = "the content type must be application/json"
            raise ApiError(415, message, "unsupported_media_type")
        return body

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        limit = self._service.settings.max_body
        too_large = ApiError(413, f"a request has at most {limit} bytes", "too_large")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > limit:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "the client has left", "client_closed_request")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            message = f"the request was not complete after {_BODY_SECONDS:g} seconds"
            raise ApiError(408, message, "timeout") from None

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        # The pattern and not the path: names that clients make up would be counted each.
        route = getattr(scope.get("route"), "path", "other")
        metrics, method = self._service.metrics, scope["method"]
        method = method if method in ("GET", "POST", "DELETE") else "other"
        metrics.requests.labels(method, route, str(status)).inc()
        metrics.seconds.labels(route).observe(seconds)
        note = scope.get("note")
        # As it came, in ASCII; without what follows a question mark.
        path = scope.get("raw_path", b"").partition(b"?")[0].decode("ascii", "replace")
        path = "".join(c if c.isprintable() else "?" for c in path[:200])
        log.info("%s %s %d %.3f s%s", method, path, status, seconds, f", {note}" if note else "")


def _host(value: str) -> str:
    """Return the name in a Host header, without its port."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0]


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a body that was read, once; then whatever comes."""
    is_given = False

    async def again() -> Any:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
