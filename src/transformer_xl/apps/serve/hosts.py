"""Which hosts and origins a request may name.

A browser sends requests of any page to any address, also to this machine. A page of another host
can send forms and simple requests (cross-site request forgery), which ``Origin`` tells; and it can
let its own name resolve to this machine and then read all answers (DNS rebinding), which ``Host``
tells. Programs that are no browsers send no ``Origin``.
"""

import ipaddress
import socket
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from transformer_xl.apps.serve.errors import ApiError

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing; a page of another origin cannot read their answers."""
_PORTS = {"http": 80, "https": 443}


class Hosts:
    """The hosts and origins that are trusted.

    A server on a loopback address trusts the names of this machine, and ``names``. One on another
    address trusts addresses and ``names``; without ``names`` it trusts all hosts.
    """

    def __init__(self, host: str, names: tuple[str, ...]) -> None:
        own = [name.lower().rstrip(".") for name in names]
        self._is_local = is_loopback(host)
        trusted = ["localhost", *own] if names or self._is_local else ["*"]
        # The framework compares; what it answers is said in our form.
        self._hosts = TrustedHostMiddleware(_mark, trusted, www_redirect=False)
        self._proxies = TrustedHostMiddleware(_mark, own, www_redirect=False)

    async def check(self, request: Request) -> None:
        """Check the host of a request, and its origin if it may change something.

        Raises:
            ApiError: One of them is not trusted.
        """
        host = request.headers.get("host", "")
        if not await _trusts(self._hosts, self._canonical(_parts(f"//{host}")[0])):
            message = f"this server does not answer to the host {host[:100]!r}: see --names"
            raise ApiError(421, message, "misdirected")
        origin = request.headers.get("origin")
        if origin is None or request.method in SAFE_METHODS:
            return
        scheme = "https" if origin.startswith("https://") else "http"
        of_page = _parts(origin)
        # A proxy may have replaced the host, and not the origin.
        if of_page != _parts(f"{scheme}://{host}") and not await _trusts(self._proxies, of_page[0]):
            message = f"a page of {origin[:100]!r} may not change anything here: see --names"
            raise ApiError(403, message, "forbidden_origin")

    def _canonical(self, name: str) -> str:
        """Return one name for all spellings of a trusted address."""
        if is_loopback(name) or (not self._is_local and _is_address(name)):
            return "localhost"
        return name


def is_loopback(host: str) -> bool:
    """Whether a host is this machine: a name of it, or an address of 127.0.0.0/8 or ::1."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    with suppress(ValueError):
        address = ipaddress.ip_address(name.removeprefix("[").removesuffix("]").partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback
    # Shorter spellings: 127.1, 0x7f000001, 2130706433.
    with suppress(OSError, ValueError):
        return socket.inet_aton(name)[0] == 127
    return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _parts(url: str) -> tuple[str, int | None]:
    """Return the host and the port of an address; ("", None) if it is none."""
    try:
        found = urlsplit(url)
        port = _PORTS.get(found.scheme) if found.port is None else found.port
    except ValueError:
        return "", None
    # A name with a user before it is none of a browser.
    if "@" in found.netloc or found.path or found.query:
        return "", None
    name = (found.hostname or "").rstrip(".")
    return f"[{name}]" if ":" in name else name, port


async def _trusts(middleware: TrustedHostMiddleware, name: str) -> bool:
    """Whether the framework passes a request to this host on."""
    scope = {"type": "http", "headers": [(b"host", name.encode("latin-1", "replace"))]}
    await middleware(scope, _receive, _send)
    return "is_trusted" in scope


async def _mark(scope: Scope, receive: Receive, send: Send) -> None:
    scope["is_trusted"] = True


async def _receive() -> Message:
    return {"type": "http.disconnect"}


async def _send(message: Message) -> None:
    pass
