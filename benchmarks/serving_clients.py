"""The clients of benchmarks/serving.py: a server process, and requests to it by turns."""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Asked:
    """A request of a session, and its answer."""

    session: str
    prompt: str
    seed: int
    length: int
    text: str | None = None
    tokens: list[int] = field(default_factory=list)
    events: int = 0
    first: float = 0.0
    seconds: float = 0.0


class Process:
    """A server, in a process of its own."""

    def __init__(self, arguments: argparse.Namespace, sessions: Path, *words: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
        command = [sys.executable, "-m", "transformer_xl", "serve", str(arguments.model)]
        command += ["--port", "0", "--sessions", str(sessions), "--max_queue", "100000", *words]
        self.log = sessions.with_suffix(f".{time.monotonic_ns()}.log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, env=environment)
        self.address = self._address()

    def _address(self) -> str:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            if found := re.search(r"listening on (http://\S+)/", self.log.read_text()):
                return found[1]
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise SystemExit(f"the server did not begin: {self.log.read_text()}")

    def resident(self) -> float:
        """Return its resident memory in MB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", text)
        return int(found[1]) / 1024 if found else float("nan")

    def processor(self) -> float:
        """Return the seconds that it computed."""
        text = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(text[11]) + int(text[12])) / os.sysconf("SC_CLK_TCK")

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal and wait."""
        self.process.send_signal(number)
        self.process.wait(120)


class Client:
    """A connection that asks one request after the other; what it does not need it leaves out.

    The clients share the machine with the server: their time is time that it lacks.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("http://").partition(":")
        self._host, self._port = host, int(port)

    async def __aenter__(self) -> "Client":
        """Connect."""
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection."""
        self._writer.close()

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Ask, and read the events of the answer as they come."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        if " 200 " not in head.partition("\r\n")[0]:
            found = re.search(r"content-length: (\d+)", head)
            text = await self._reader.readexactly(int(found[1]) if found else 0)
            raise RuntimeError(f"{head}{text.decode()}")
        rest = b""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            rest += (await self._reader.readexactly(size + 2))[:-2]
            *lines, rest = rest.split(b"\n\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
        await self._reader.readexactly(2)


async def ask(client: Client, asked: Asked) -> None:
    """Ask, and read the answer as it comes."""
    about = {"prompt": asked.prompt, "max_tokens": asked.length, "seed": asked.seed}
    body = {**about, "session": asked.session, "stream": True}
    started, text, tokens, reason = time.perf_counter(), "", [], None
    async for value in client.events("/v1/completions", body):
        if "error" in value:
            raise RuntimeError(value["error"]["message"])
        asked.events += 1
        for piece in value["choices"]:
            asked.first = asked.first or time.perf_counter() - started
            text += piece["text"]
            tokens += piece["token_ids"]
            reason = piece["finish_reason"] or reason
    if reason is None:
        raise RuntimeError("the answer broke off")
    asked.seconds, asked.text, asked.tokens = time.perf_counter() - started, text, tokens


async def load(address: str, sessions: list[list[Asked]], done: list[Asked]) -> None:
    """Let all sessions ask at once, each one request after the other."""

    async def one(asked: list[Asked]) -> None:
        async with Client(address) as client:
            for each in asked:
                await ask(client, each)
                done.append(each)

    # All end before the first error is raised.
    for result in await asyncio.gather(*map(one, sessions), return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def percentiles(values: list[float]) -> dict[str, float]:
    """Return p50, p95 and p99 in milliseconds."""
    ordered = sorted(values)
    return {
        f"p{p}": round(1000 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 2)
        for p in (50, 95, 99)
    }


@dataclass
class Turns:
    """What came of the turns of one way to ask."""

    done: list[Asked] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)
    seconds: float = 0.0
    clients: float = 0.0
    server: float = 0.0

    def take(self, server: Process, sessions: list[list[Asked]]) -> None:
        """Ask in one turn."""
        done: list[Asked] = []
        before, clients = server.processor(), time.process_time()
        started = time.perf_counter()
        asyncio.run(load(server.address, sessions, done))
        seconds = time.perf_counter() - started
        self.clients += time.process_time() - clients
        self.server += server.processor() - before
        self.paces.append(sum(len(each.tokens) for each in done) / seconds)
        self.seconds += seconds
        self.done += done

    def result(self) -> dict[str, Any]:
        """Return it as numbers."""
        done, tokens = self.done, sum(len(each.tokens) for each in self.done)
        spent = {"client": self.clients, "server": self.server}
        return {
            "requests": len(done),
            "tokens": tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(tokens / self.seconds, 1),
            "requests_per_second": round(len(done) / self.seconds, 2),
            "latency_ms": percentiles([each.seconds for each in done]),
            "first_token_ms": percentiles([each.first for each in done]),
            "tokens_per_event": round(tokens / sum(each.events for each in done), 2),
            "processor_ms_per_token": {k: round(1000 * x / tokens, 3) for k, x in spent.items()},
        }
