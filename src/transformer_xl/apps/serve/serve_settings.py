"""How a model is served: addresses and limits."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from transformer_xl.config.checks import (
    HIDDEN,
    Count,
    NotNegative,
    Positive,
    Range,
    check,
    no_type_check,
    require,
)


@no_type_check
@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """How a model is served."""

    host: str = "127.0.0.1"
    """Address to listen on; any but 127.0.0.1 opens the server to others, see above."""
    port: Annotated[int, Range(ge=0, le=65_535)] = 8000
    """Port to listen on; 0: a free one, which is said."""
    names: tuple[str, ...] = ()
    """Names of hosts, besides localhost, that requests may be addressed to: those of a proxy."""
    api_key: str | None = field(default=None, metadata=HIDDEN)
    """Key that requests must bring, Authorization: Bearer KEY; better in TXL_API_KEY, unseen."""
    name: str | None = None
    """Name of the model; None: that of its folder."""
    sessions: Path | None = None
    """Folder in which sessions are kept; None: in memory alone, until the server ends."""
    save: Literal["answer", "later"] = "answer"
    """answer: before an answer ends, so a kill loses nothing; later: when it leaves the memory."""
    max_sessions: Count = 10_000
    """Sessions that are kept in all."""
    sessions_in_memory: Count = 1_000
    """Sessions in memory; those used least recently are on the disk alone."""
    session_bytes: Count = 1 << 30
    """Bytes of the sessions in memory."""
    session_idle: Positive = 604_800.0
    """Seconds after which a session that nobody uses is deleted."""
    max_batch: Count = 64
    """Texts written side by side."""
    piece: Count = 128
    """Tokens of a prompt read between two steps of the other texts."""
    max_prompt: Count = 65_536
    """Tokens of a prompt."""
    max_tokens: Count = 4_096
    """Tokens of an answer."""
    max_texts: Count = 64
    """Texts of a request: its prompts times n."""
    max_queue: Count = 256
    """Texts that wait for a place; beyond, a request is refused with 429."""
    max_connections: Count = 1_024
    """Connections at once; beyond, a request is refused with 503."""
    max_seconds: Positive = 300.0
    """Seconds of a request; then its texts end where they are."""
    max_body: Count = 1 << 20
    """Bytes of a request."""
    shutdown_seconds: NotNegative = 10.0
    """Seconds that running requests have when the server is told to stop."""

    def __post_init__(self) -> None:
        check(self)
        # Not shown: an error ends up in logs.
        is_plain = self.api_key is None or (self.api_key.isascii() and self.api_key.isprintable())
        require(is_plain and self.api_key != "", "api_key must be printable ASCII and not empty")
