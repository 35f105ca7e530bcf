"""The process that serves: a socket, connections with time limits, signals, an orderly end."""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from transformer_xl.apps.serve.api import create_app
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.service import Service
from transformer_xl.config import GenerateConfig
from transformer_xl.data import Vocab
from transformer_xl.model import LanguageModel

SECONDS = 20.0
"""How long a client may take to send the head of a request, or to take what was written."""


class PatientProtocol(H11Protocol):
    """HTTP/1.1 with an end to patience.

    A connection is closed when the head of a request is not complete after so many seconds
    (bodies have a limit of their own, in :mod:`transformer_xl.apps.serve.guard`; between requests
    it is uvicorn's ``timeout_keep_alive``), and when a client has taken nothing for as long of
    what was written to it.
    """

    _head: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Wait for a request."""
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._head, self._stuck = _cancelled(self._head), _cancelled(self._stuck)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Take what came; when a request began with it, nothing is waited for."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._head = _cancelled(self._head)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._expect()
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that is not used, and do not wait until all was taken."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        """Wait for the client to take what was written."""
        super().pause_writing()
        self._stuck = self.loop.call_later(SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: the client has taken it."""
        self._stuck = _cancelled(self._stuck)
        super().resume_writing()

    def _expect(self) -> None:
        _cancelled(self._head)
        self._head = self.loop.call_later(SECONDS, self.transport.abort)


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()


try:
    import fcntl
except ImportError:  # Where there is none, two servers are not kept apart.
    fcntl = None

log = logging.getLogger("transformer_xl.serve")

_SWITCH_SECONDS = 0.001
"""After how long a thread lets another one go on that waits for it."""
_MARGIN = 2.0
"""Seconds in which texts that were cut are still sent."""


class Server(uvicorn.Server):
    """A server that ends its texts and saves its sessions before it stops.

    On SIGTERM or SIGINT it takes no more requests; running ones have ``shutdown_seconds``, are
    then ended where they are, and sent within two seconds more.

    Args:
        service: What it serves.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        settings = service.settings
        config = uvicorn.Config(
            create_app(service),
            http=PatientProtocol,
            limit_concurrency=settings.max_connections,
            # Nothing asks where a request came from.
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            ws="none",
            timeout_graceful_shutdown=int(settings.shutdown_seconds + _MARGIN + 0.5),
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let signals end the server; afterwards they do again what they did before."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more, end what runs, save."""
        service = self.service
        service.is_closing = True
        log.info("stopping: running requests have %g s", service.settings.shutdown_seconds)
        cut = asyncio.get_running_loop().call_later(
            service.settings.shutdown_seconds, service.engine.cut
        )
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        OSError: The address is in use or not of this machine.
    """
    try:
        kind = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=kind, backlog=1024)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


@contextmanager
def alone_in(folder: Path | None) -> Iterator[None]:
    """Hold the folder of the sessions; two servers would write over what each other saved.

    Raises:
        OSError: It cannot be used, or another server uses it.
    """
    if folder is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise OSError(f"sessions={folder} is no folder: name one, or a new one") from error
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # It ends with the process, however that ends.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise OSError(
            f"another server keeps its sessions in {folder}: end it, or name another folder"
        ) from error
    except OSError:  # A file system without locks.
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def address_of(listening: socket.socket) -> str:
    """Return the address for a browser."""
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
    """Serve a model until a signal comes.

    Args:
        model: The model, in evaluation mode.
        vocab: Its vocabulary.
        weights: Its weights file, to which sessions belong.
        settings: Addresses and limits.
        name: What the model is called.
        generation: How it draws what a request leaves open. None: as tokens are distributed.

    Raises:
        OSError: The address cannot be listened on, or the folder of the sessions not be
            used.
    """
    with listen(settings.host, settings.port) as listening, alone_in(settings.sessions):
        server = Server(Service(model, vocab, weights, settings, name, generation))
        found = len(server.service.sessions)
        where = f"in {settings.sessions}" if settings.sessions else "in memory alone"
        log.info("%s with %d sessions %s", name, found, where)
        drawing = server.service.sampler(None, None, None).settings
        known = ", ".join(f"{key} {'none' if x is None else x}" for key, x in drawing.items())
        log.info("drawing, where a request says nothing else, with %s", known)
        log.info("listening on %s", address_of(listening))
        # The engine computes all the time; who waits for requests should not wait 5 ms for it.
        sys.setswitchinterval(_SWITCH_SECONDS)
        server.run(sockets=[listening])
        log.info("stopped")
