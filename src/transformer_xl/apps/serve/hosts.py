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

from starlette.requests import Request

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
        self._names = [_plain(name.lower().rstrip(".")) for name in names]
        self._is_local = is_loopback(host)
        self._trusts_all = not (names or self._is_local)

    def check(self, request: Request) -> None:
        """Check the host of a request, and its origin if it may change something.

        Raises:
            ApiError: One of them is not trusted.
        """
        host = request.headers.get("host", "")
        name, _ = _parts(f"//{host}")
        is_own = is_loopback(name) or (not self._is_local and _address(name) is not None)
        if not (self._trusts_all or is_own or self._has(name)):
            message = f"this server does not answer to the host {host[:100]!r}: see --names"
            raise ApiError(421, message, "misdirected")
        origin = request.headers.get("origin")
        if origin is None or request.method in SAFE_METHODS:
            return
        scheme = "https" if origin.startswith("https://") else "http"
        of_page = _parts(origin)
        # A proxy may have replaced the host, and not the origin.
        if of_page != _parts(f"{scheme}://{host}") and not self._has(of_page[0]):
            message = f"a page of {origin[:100]!r} may not change anything here: see --names"
            raise ApiError(403, message, "forbidden_origin")

    def _has(self, name: str) -> bool:
        """Whether a host is one of ``names``; ``*.example`` are all below ``example``."""
        name = _plain(name)
        return any(name.endswith(x[1:]) if x[:2] == "*." else name == x for x in self._names)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine: a name of it, or an address of 127.0.0.0/8 or ::1."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(name)
    return address is not None and (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a host is, in any spelling; None if it is a name."""
    name = name.removeprefix("[").removesuffix("]").partition("%")[0]
    with suppress(ValueError):
        return ipaddress.ip_address(name)
    # Shorter spellings: 127.1, 0x7f000001, 2130706433. What follows a space would be ignored.
    with suppress(OSError, ValueError):
        return None if name.split() != [name] else ipaddress.IPv4Address(socket.inet_aton(name))
    return None


def _plain(name: str) -> str:
    """Return one spelling of a host that is an address, without brackets; a name as it is."""
    address = _address(name)
    return name if address is None else str(address)


def _parts(url: str) -> tuple[str, int | None]:
    """Return the host and the port of an address; ("", None) if it is none."""
    try:
        parts = urlsplit(url)
        port = _PORTS.get(parts.scheme) if parts.port is None else parts.port
    except ValueError:
        return "", None
    # A name with a user before it is none of a browser.
    if "@" in parts.netloc or parts.path or parts.query:
        return "", None
    return (parts.hostname or "").rstrip("."), port
