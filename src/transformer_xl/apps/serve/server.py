"""The server process: the socket, signals, graceful shutdown."""

import asyncio
import logging
import math
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import uvicorn

from transformer_xl.apps.serve.api import create_app
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.service import Service
from transformer_xl.config import GenerateConfig, locked
from transformer_xl.data import Vocab
from transformer_xl.model import LanguageModel

log = logging.getLogger("transformer_xl.serve")

_SWITCH_SECONDS = 0.001
"""Interval after which a thread releases the interpreter lock to a waiting one."""
_MARGIN = 2
"""Seconds to send truncated texts."""


class Server(uvicorn.Server):
    """A server that finishes its texts and saves its sessions before it stops.

    On SIGTERM or SIGINT it accepts no more requests; running ones have ``shutdown_seconds``, are
    then truncated, and sent within two seconds more.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        settings = service.settings
        config = uvicorn.Config(
            create_app(service),
            http="h11",
            limit_concurrency=settings.max_connections,
            # The address of the client is not used.
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            ws="none",
            timeout_graceful_shutdown=math.ceil(settings.shutdown_seconds) + _MARGIN,
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; uvicorn would raise the signal again at the end."""
        self.force_exit |= self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more requests, finish or truncate running texts, save the sessions."""
        service, seconds = self.service, self.service.settings.shutdown_seconds
        log.info("stopping: %d running requests have %g s", len(self.server_state.tasks), seconds)
        asyncio.get_running_loop().call_later(seconds, service.engine.cut)
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        OSError: The address is in use or does not belong to this machine.
    """
    try:
        kind = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=kind, backlog=1024)
    except (OSError, UnicodeError) as error:
        remedy = "give an address of this machine as --host, or another --port; 0 is a free one"
        raise OSError(f"cannot listen on {host}:{port}: {error}: {remedy}") from error


@contextmanager
def alone_in(folder: Path | None) -> Iterator[None]:
    """Lock the folder of the sessions: two servers would overwrite each other's files.

    Raises:
        OSError: It cannot be used.
        RuntimeError: Another server has locked it.
    """
    with ExitStack() as ending:
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                held = f"another server keeps its sessions in {folder}: stop it, or give another "
                ending.enter_context(locked(folder / ".lock", held + "folder"))
        except OSError as error:
            raise OSError(
                f"sessions={folder} is no folder that can be written to ({error}): give "
                "one that is, or leave --sessions out to keep them in memory only"
            ) from error
        yield


def require_usable(settings: ServeSettings) -> None:
    """Require that a server can listen on its address and keep its sessions.

    Raises:
        OSError: It cannot.
        RuntimeError: Another server keeps its sessions in that folder.
    """
    with listen(settings.host, settings.port), alone_in(settings.folder):
        pass


def address_of(listening: socket.socket) -> str:
    """Return the URL."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def serve(
    model: LanguageModel,
    vocab: Vocab,
    weights: Path,
    settings: ServeSettings,
    name: str,
    generation: GenerateConfig | None = None,
) -> None:
    """Serve a model, in evaluation mode, until a signal stops it.

    Sessions belong to ``weights``, its weights file. ``generation`` has the defaults of sampling;
    None: the model's distribution as it is.

    Raises:
        OSError: It cannot listen on the address, or cannot use the folder of the sessions.
        RuntimeError: Another server keeps its sessions in that folder.
    """
    with listen(settings.host, settings.port) as listening, alone_in(settings.folder):
        server = Server(Service(model, vocab, weights, settings, name, generation))
        service, where = server.service, settings.folder or "memory only"
        log.info("%s with %d sessions in %s", name, len(service.sessions), where)
        log.info("listening on %s", address_of(listening))
        # The engine's thread is always busy; the default interval of 5 ms would delay requests.
        sys.setswitchinterval(_SWITCH_SECONDS)
        server.run(sockets=[listening])
        log.info("stopped")
