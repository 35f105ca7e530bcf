"""What benchmarks/shared_sessions.py and tests start: Redis, a proxy, and servers behind it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import httpx
import redis

_PROXY = """
defaults
  mode http
  timeout connect 2s
  timeout client 60s
  timeout server 60s
  timeout queue 2s
  retries 2
  option redispatch
  retry-on conn-failure
frontend all
  bind 127.0.0.1:{port}
  default_backend servers
backend servers
  balance roundrobin
  option httpchk
  http-check send meth GET uri /health/ready hdr Host localhost
  default-server check inter 500ms fall 2 rise 1 on-marked-down shutdown-sessions
"""


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def missing() -> str:
    """Return what is not installed; an empty string: nothing."""
    programs = [name for name in ("redis-server", "haproxy") if shutil.which(name) is None]
    return f"apt install {' '.join(programs)}" if programs else ""


def is_ready(address: str) -> bool:
    """Whether a server, or one behind a proxy, takes requests."""
    with suppress(httpx.HTTPError):
        return httpx.get(f"{address}/health/ready", timeout=1).status_code == 200
    return False


class Redis:
    """A Redis with an append-only file that is written through before each answer."""

    def __init__(self, folder: Path) -> None:
        self.port, self._folder = free_port(), folder
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        how = ["--save", "", "--appendonly", "yes", "--appendfsync", "always"]
        self.process = subprocess.Popen(
            ["redis-server", *where, *how], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.client = redis.Redis.from_url(self.url, socket_timeout=60)
        end = time.monotonic() + 60
        while True:
            with suppress(redis.ConnectionError, redis.TimeoutError):
                if self.client.ping():
                    return
            if time.monotonic() > end:
                raise RuntimeError("redis-server did not start")
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait(60)
        self.client.close()


class Proxy:
    """haproxy, which passes requests on to servers by turns."""

    def __init__(self, folder: Path, ports: Sequence[int]) -> None:
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        lines = [f"  server s{n} 127.0.0.1:{each}\n" for n, each in enumerate(ports)]
        path = folder / "haproxy.cfg"
        path.write_text(_PROXY.format(port=port) + "".join(lines))
        with (folder / "haproxy.log").open("w") as log:
            self.process = subprocess.Popen(
                ["haproxy", "-db", "-f", str(path)], stdout=log, stderr=log
            )

    def end(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait(60)


class Member:
    """One of several servers: it can be killed or stopped, and comes back by itself.

    It is forked from a process that has imported all, so that it is back soon.
    """

    def __init__(self, model: Path, url: str, folder: Path, words: Sequence[str]) -> None:
        self.port, self._n_starts = free_port(), 0
        self._folder = folder
        where = ["serve", str(model), "--port", str(self.port), "--sessions", url]
        self._words = [*where, "--max_queue", "100000", *words]
        self._start()

    def _start(self) -> None:
        self._n_starts += 1
        log = self._folder / f"{self.port}.{self._n_starts}.log"
        self._process = _CONTEXT.Process(target=_serve, args=(self._words, log))
        self._process.start()

    @property
    def is_ready(self) -> bool:
        """Whether it answers."""
        return is_ready(f"http://127.0.0.1:{self.port}")

    def kill(self) -> None:
        """Kill it, and start it again."""
        self.end()
        self._start()

    def pause(self, seconds: float) -> None:
        """Stop it for a time, after which it goes on where it was."""
        assert self._process.pid
        os.kill(self._process.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.join(60)

    def logs(self) -> str:
        """Return what it has logged since it was first started."""
        paths = sorted(self._folder.glob(f"{self.port}.*.log"))
        return "".join(path.read_text() for path in paths)


_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["transformer_xl.apps.serve.server", "transformer_xl.cli.models", "redis", "tyro"]
)


def _serve(words: list[str], log: Path) -> None:
    """Be `txl serve`, in a process of its own."""
    with log.open("w") as opened:
        os.dup2(opened.fileno(), sys.stderr.fileno())
    sys.argv = ["txl", *words]
    from transformer_xl.cli import main

    sys.exit(main())
