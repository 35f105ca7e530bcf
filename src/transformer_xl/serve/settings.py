"""How a model is served: addresses and limits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformer_xl.config.checks import require, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """How a model is served."""

    host: str = "127.0.0.1"
    """Address to listen on; any but 127.0.0.1 opens the server to others, see above."""
    port: int = 8000
    """Port to listen on; 0: a free one, which is said."""
    names: tuple[str, ...] = ()
    """Names of hosts, besides localhost, that requests may be addressed to: those of a proxy."""
    api_key: str | None = None
    """Key that requests must bring, Authorization: Bearer KEY; better in TXL_API_KEY, unseen."""
    name: str | None = None
    """Name of the model; None: that of its folder."""
    sessions: Path | None = None
    """Folder in which sessions are kept; None: in memory alone, until the server ends."""
    save: Literal["answer", "later"] = "answer"
    """answer: before an answer ends, so a kill loses nothing; later: when it leaves the memory."""
    max_sessions: int = 10_000
    """Sessions that are kept in all."""
    sessions_in_memory: int = 1_000
    """Sessions in memory; those used least recently are on the disk alone."""
    session_bytes: int = 1 << 30
    """Bytes of the sessions in memory."""
    session_idle: float = 604_800.0
    """Seconds after which a session that nobody uses is deleted."""
    max_batch: int = 64
    """Texts written side by side."""
    piece: int = 128
    """Tokens of a prompt read between two steps of the other texts."""
    max_prompt: int = 65_536
    """Tokens of a prompt."""
    max_tokens: int = 4_096
    """Tokens of an answer."""
    max_texts: int = 64
    """Texts of a request: its prompts times n."""
    max_queue: int = 256
    """Texts that wait for a place; beyond, a request is refused with 429."""
    max_connections: int = 1_024
    """Connections at once; beyond, a request is refused with 503."""
    max_seconds: float = 300.0
    """Seconds of a request; then its texts end where they are."""
    max_body: int = 1 << 20
    """Bytes of a request."""
    shutdown_seconds: float = 10.0
    """Seconds that running requests have when the server is told to stop."""

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65_535, f"port={self.port} must be from 0 to 65535")
        for name in (
            "max_sessions",
            "sessions_in_memory",
            "session_bytes",
            "session_idle",
            "max_batch",
            "piece",
            "max_prompt",
            "max_tokens",
            "max_texts",
            "max_queue",
            "max_connections",
            "max_seconds",
            "max_body",
        ):
            require_positive(name, getattr(self, name))
        require(
            self.shutdown_seconds >= 0,
            f"shutdown_seconds={self.shutdown_seconds} must be at least 0",
        )
        # Not shown: an error ends up in logs.
        is_plain = self.api_key is None or (self.api_key.isascii() and self.api_key.isprintable())
        require(is_plain and self.api_key != "", "api_key must be printable ASCII and not empty")
