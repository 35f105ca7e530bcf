"""How a model is served: addresses and limits."""

import re
import socket
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Annotated

from annotated_types import Interval

from transformer_xl.config import (
    Count,
    check,
    require,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """How a model is served."""

    host: str = "127.0.0.1"
    """Address to listen on; any but 127.0.0.1 exposes the server to others, see above."""
    port: Annotated[int, Interval(ge=0, le=65_535)] = 8000
    """Port to listen on; 0: a free one, which is logged."""
    names: tuple[str, ...] = ()
    """Host names that are accepted besides localhost and IP addresses, such as that of a proxy;
    *.example.com: all of that domain. Without any, another --host than 127.0.0.1 accepts all."""
    preface: bool = True
    """Read the preface of the model, if it has one, into the memory before texts that begin."""
    api_key: str | None = field(default=None, metadata={"is_hidden": True})
    """Key that requests must send, Authorization: Bearer KEY; better set by TXL_API_KEY. Several:
    one a line, any of which requests must send."""
    name: str | None = None
    """Name of the model; None: that of its folder."""
    sessions: str | Path | None = None
    """Folder in which sessions are saved, of one server. None: in memory only, until the
    server stops."""
    template: str | None = None
    """Text of one message of a chat, with {role} and {content}, such as '<{role}>{content}</s>'.
    None: a plain one, lines of '{role}: {content}'."""
    max_sessions: Count = 10_000
    """Largest number of sessions."""
    session_bytes: Count = 1 << 30
    """Largest number of bytes of sessions in memory only, each counted at its full size."""
    prefix_bytes: Annotated[int, Interval(ge=0)] = 1 << 28
    """Largest number of bytes of the states of earlier texts without a session, from which a prompt
    that begins with them goes on; 0: prompts are read from their beginning."""
    session_idle: Annotated[float, Interval(gt=0)] = 604_800.0
    """Seconds after which an unused session is deleted."""
    max_batch: Count = 64
    """Batch size: largest number of texts generated at once."""
    piece: Count = 128
    """Tokens of a prompt that are read between two steps of the other texts."""
    max_prompt: Count = 65_536
    """Largest number of tokens of a prompt."""
    max_tokens: Count = 4_096
    """Largest number of tokens of a response."""
    max_queue: Count = 256
    """Largest number of waiting texts, and of texts of a request, its prompts times n; beyond, a
    request is refused with 429."""
    max_connections: Count = 1_024
    """Largest number of connections; beyond, a request is refused with 503."""
    max_seconds: Annotated[float, Interval(gt=0)] = 300.0
    """Time limit of a request in seconds; then its texts are truncated."""
    max_body: Count = 1 << 20
    """Largest size of a request in bytes."""
    shutdown_seconds: Annotated[float, Interval(ge=0)] = 10.0
    """Seconds that running requests have to finish when the server stops."""

    def __post_init__(self) -> None:
        check(self)
        keys = self.keys
        keys_are_plain = all(key.isascii() and key.isprintable() for key in keys)
        host = re.compile(r"(\*\.)?[^\s/*:\[\]]+|\[[0-9A-Fa-f:.]+\]")
        wrong_names = [name for name in self.names if not host.fullmatch(name)]
        # Keys and addresses, which may have a password, are not shown: errors are logged.
        for holds, rule in (
            (
                self.api_key is None or (keys and keys_are_plain),
                "api_key must be printable ASCII and not empty, one key a line",
            ),
            # Only a text can be empty: Path("") is Path("."), which is a folder.
            (
                self.sessions != "",
                "sessions='' is no folder: give one, or leave it out to keep sessions in memory "
                "only",
            ),
            (
                re.match(r"(rediss?|unix)://", str(self.sessions)) is None,
                "sessions in Redis are gone: give each server a folder of its own, and let a proxy "
                "send a session to its server by the header X-Session, as docs/serving.md shows",
            ),
            (
                self.template is None or self.template.count("{content}") == 1,
                f"template={self.template!r} must have {{content}} once, and may have {{role}}",
            ),
            (
                not wrong_names,
                f"names={''.join(wrong_names[:1])!r} must be a host name without a port, such as "
                "models.example, *. and a domain, or an IPv6 address in brackets",
            ),
        ):
            require(bool(holds), rule)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names, besides all IP addresses, that requests may have as their host; none: any.

        On a loopback address a page elsewhere could let its own name mean this machine.
        """
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][4][0]
        address = ip_address(found)
        if isinstance(address, IPv6Address):
            address = address.ipv4_mapped or address
        if not (address.is_loopback or self.names):
            return ()
        names = "localhost", self.host, *self.names
        return tuple(name.lower().removesuffix(".") for name in names)

    @property
    def folder(self) -> Path | None:
        """The folder in which sessions are saved; None: in memory only."""
        return None if self.sessions is None else Path(self.sessions)

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys, of which a request must send one; none: requests need no key."""
        lines = (self.api_key or "").split("\n")
        return tuple(key for line in lines if (key := line.strip()))
