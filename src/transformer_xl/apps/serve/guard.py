"""Middleware for every request: hosts, keys, limits, metrics and the access log."""

import asyncio
import hashlib
import hmac
import logging
import time

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transformer_xl.apps.serve.errors import ApiError, NotStartedError
from transformer_xl.apps.serve.hosts import Hosts
from transformer_xl.apps.serve.responses import error_response
from transformer_xl.apps.serve.service import Service

log = logging.getLogger("transformer_xl.serve")

_PUBLIC_PATHS = ("/", "/openapi.json", "/health", "/health/live", "/health/ready")
"""Paths that need no key: they reveal nothing of other users' texts."""
_PATHS_OF_THE_END = ("/health", "/health/live", "/health/ready", "/metrics")
"""Paths that are answered while the server ends."""
_BODY_SECONDS = 30.0
"""How long a client may take to send its request."""
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Guard:
    """Authenticates, limits, counts and logs all requests."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service, settings = app, service, service.settings
        self._hosts = Hosts(settings.host, settings.names)
        # Digests have one length, so that a comparison takes the same time for every key.
        self._keys = [_digest(key.encode()) for key in settings.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or respond with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, method = time.perf_counter(), 500, scope["method"]
        # HEAD is answered as GET is, wherever that is.
        answered = "GET" if method == "HEAD" else method
        scope = {**scope, "method": answered, "path": self._path(scope)}

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            elif method == "HEAD":
                message = {**message, "body": b""}
            await send(message)

        try:
            with self._service.answering():
                body = await self._checked(Request(scope, receive))
                await self._app(scope, _replayed(body, receive), sending)
        except ApiError as error:
            await error_response(error)(scope, receive, sending)
        finally:
            self._record(scope, method, status, time.perf_counter() - started)

    def _path(self, scope: Scope) -> str:
        """Return the path of a request without that of a proxy, and without slashes at its end.

        Not by a redirect: a proxy may have removed a part of the path that it would need.
        """
        path, root = scope["path"], self._service.settings.root_path
        if f"{path}/".startswith(f"{root}/"):
            path = path.removeprefix(root)
        return path.rstrip("/") or "/"

    async def _checked(self, request: Request) -> bytes:
        """Check a request and return its body.

        Raises:
            ApiError: It is refused.
        """
        headers = request.headers
        self._hosts.check(request)
        path = request.scope["path"]
        if self._keys and path not in _PUBLIC_PATHS:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            digest = _digest(key.strip().encode("latin-1"))
            # All are compared, whichever it is.
            n_equal = sum([hmac.compare_digest(digest, each) for each in self._keys])
            if scheme.lower() != "bearer" or not n_equal:
                message = "the API key is missing or wrong: send Authorization: Bearer KEY"
                raise ApiError(401, message, "invalid_api_key")
        if self._service.is_closing and path not in _PATHS_OF_THE_END:
            raise NotStartedError("stopping")
        body = await self._body(request)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if body and kind != "application/json":
            # A page of another origin cannot send this type without a preflight request.
            message = "the content type must be application/json"
            raise ApiError(415, message, "unsupported_media_type")
        return body

    async def _body(self, request: Request) -> bytes:
        limit = self._service.settings.max_body
        too_large = ApiError(413, f"a request has at most {limit} bytes", "too_large")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise too_large
        except ClientDisconnect:
            raise ApiError(400, "the client disconnected", "client_closed_request") from None
        except TimeoutError:
            message = f"the request was not complete after {_BODY_SECONDS:g} seconds"
            raise ApiError(408, message, "timeout") from None
        return bytes(body)

    def _record(self, scope: Scope, method: str, status: int, seconds: float) -> None:
        # The route instead of the path: each invented path would become a metric of its own.
        route = getattr(scope.get("route"), "path_format", "other")
        metrics = self._service.metrics
        known = method if method in ("GET", "HEAD", "POST", "DELETE") else "other"
        metrics.requests.labels(known, route, str(status)).inc()
        metrics.seconds.labels(route).observe(seconds)
        note = scope.get("note")
        # As received, in ASCII, without the query string.
        path = scope.get("raw_path", b"").partition(b"?")[0].decode("ascii", "replace")
        path = "".join(c if c.isprintable() else "?" for c in path[:200])
        log.info("%s %s %d %.3f s%s", method, path, status, seconds, f", {note}" if note else "")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that first returns the body that was read already."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again
