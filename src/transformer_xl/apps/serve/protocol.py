"""Connections that are closed when nothing moves on them: uvicorn's, which would wait for ever."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

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
