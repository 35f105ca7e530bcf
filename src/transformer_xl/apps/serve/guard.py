"""Middleware for every request: hosts, keys, size and type of the body, metrics, the access log."""

import hmac
import logging
import re
import time

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transformer_xl.apps.serve.errors import ApiError
from transformer_xl.apps.serve.responses import error_response
from transformer_xl.apps.serve.service import Service
from transformer_xl.model import shown

log = logging.getLogger("transformer_xl.serve")

_PUBLIC_PATHS = ("/", "/openapi.json", "/health", "/health/live", "/health/ready")
"""Paths that need no key: they reveal nothing of other users' texts."""


class Guard:
    """Authenticates, limits, counts and logs all requests."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._limit = service.settings.max_body
        self._keys = [key.encode() for key in service.settings.keys]
        self._hosts = service.settings.hosts
        self._domains = tuple(name[1:] for name in self._hosts if name.startswith("*"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or respond with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, size = time.perf_counter(), 500, 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                raise HTTPException(413, f"a request has at most {self._limit} bytes")
            return message

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._require_allowed(Request(scope))
            await self._app(scope, limited, sending)
        except ApiError as error:
            await error_response(error)(scope, receive, sending)
        finally:
            seconds = time.perf_counter() - started
            self._service.n_answers.labels(str(status)).inc()
            self._service.seconds.observe(seconds)
            # As received, in ASCII, without the query string.
            path = scope.get("raw_path", b"").partition(b"?")[0].decode("ascii", "replace")
            path = "".join(c if c.isprintable() else "?" for c in path[:200])
            note = f", {scope['note']}" if "note" in scope else ""
            log.info("%s %s %d %.3f s%s", scope["method"], path, status, seconds, note)

    def _require_allowed(self, request: Request) -> None:
        """Require an accepted host, a key, and JSON.

        Raises:
            ApiError: The host is another one, the key is missing or wrong, or the body is of
                another type.
        """
        headers, path = request.headers, request.scope["path"]
        host = re.sub(r":[0-9]*$", "", headers.get("host", "").lower()).removesuffix(".")
        # Only a name can be made to mean another machine, and an address cannot.
        is_address = re.fullmatch(r"[0-9.]+|\[[0-9a-f:.]+\]", host) is not None
        is_known = is_address or host in self._hosts or host.endswith(self._domains)
        if self._hosts and not is_known:
            message = f"the host {shown(host)} is not accepted: start txl serve with --names NAME"
            raise ApiError(400, message, "unknown_host")
        if self._keys and path not in _PUBLIC_PATHS:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            sent = key.strip().encode("latin-1")
            is_known = any(hmac.compare_digest(sent, each) for each in self._keys)
            if scheme.lower() != "bearer" or not is_known:
                message = "the API key is missing or wrong: send Authorization: Bearer KEY"
                raise ApiError(401, message, "invalid_api_key")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            # A page of another origin cannot send this type without a preflight request.
            message = "the content type must be application/json"
            raise ApiError(415, message, "unsupported_media_type")
