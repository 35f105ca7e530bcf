"""A store on this machine: a web server that counts, and fails when told to."""

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest


class Web:
    """A folder that a web server shows.

    Attributes:
        folder: The folder.
        url: Its address.
        sent: Bytes that were sent, by the name of the file.
        statuses: What is answered instead, one for each request to come.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sent: Counter[str] = Counter()
        self.statuses: list[int] = []
        self.on_get = lambda name: None
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                web._answer(self, is_get=False)

            def do_GET(self) -> None:
                web._answer(self, is_get=True)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        # Many connections at once.
        self._server.socket.listen(64)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler, *, is_get: bool) -> None:
        name = unquote(urlsplit(request.path).path).lstrip("/")
        path = self.folder / name
        if is_get:
            self.on_get(name)
        status = self.statuses.pop(0) if self.statuses else 0
        # As the host of WikiText does.
        status = 403 if "urllib" in request.headers["User-Agent"] else status
        if status or not path.exists():
            request.send_error(status or 404)
            return
        if path.is_dir():
            links = [f"<a href='{x.name}{'/' * x.is_dir()}'>x</a>" for x in path.iterdir()]
            # As Apache does: to sort them, and to the folder above.
            links += [f"<a href='{x}'>x</a>" for x in ("?C=N;O=D", "/")]
            data, is_page = "".join(links).encode(), True
        else:
            data, is_page = path.read_bytes(), False
        request.send_response(200)
        request.send_header("Content-Type", "text/html" if is_page else "text/plain")
        request.send_header("Content-Length", str(len(data)))
        request.send_header("ETag", hashlib.md5(data).hexdigest())
        if is_get:
            # Before anything goes out, so that who has the headers alone finds it counted.
            self.sent[name] += len(data)
        request.end_headers()
        if is_get:
            # Who asked may have been killed.
            with suppress(ConnectionError):
                request.wfile.write(data)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Corpora are prepared with one thread, unless more are asked for."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    folder = tmp_path / "web"
    folder.mkdir()
    web = Web(folder)
    yield web
    web.stop()
