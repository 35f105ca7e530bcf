"""Servers that share sessions, killed again and again: is a token lost, or written twice?

    python benchmarks/shared_sessions.py --servers 2 --kills 100 --json shared_sessions.json

Several servers with the same model and one Redis (append-only file, appendfsync always) are behind
one haproxy, which passes each request to the next of them. Clients, each with a session, ask
without a pause; a request that breaks off, or gets 409, 502, 503 or 504, is sent again with the
same Idempotency-Key until it is answered. Meanwhile, by turns that a seed decides, a server is
killed (SIGKILL), or stopped (SIGSTOP) for longer than its lease, or Redis is killed and started
again. Some requests are sent twice on purpose.

At the end every answer is compared with what the same model writes alone, one request after the
other; and what each session remembers with its requests and answers. A request that is not
answered within 10 seconds, and any 500, counts as a failure.

The model is a tiny one with random weights, unless a folder is given.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import torch
from result_file import json_text, write_result_file
from serving import Alone, compare
from serving_clients import Asked, percentiles
from shared_servers import Member, Proxy, Redis, is_ready, missing
from turns import circumstances

from transformer_xl.config import ModelConfig
from transformer_xl.config.device import keep_freed_memory
from transformer_xl.data import train_vocab
from transformer_xl.model import build_model

LETTERS = "the quick brown fox jumps over the lazy dog and then it sleeps for a while in the sun "
HANGS = 10.0
"""Seconds after which a request hangs."""
AGAIN = (409, 429, 502, 503, 504)
"""Statuses after which a request is sent again."""
KINDS = {"server killed": 7, "server stopped": 2, "store killed": 2}
"""What happens, and how often."""


def tiny(folder: Path) -> Path:
    """Write a model with random weights, far from zero, so that a wrong memory shows."""
    torch.manual_seed(0)
    vocab = train_vocab("chars", [LETTERS])
    config = ModelConfig(
        vocab_size=len(vocab), n_layer=2, n_head=2, d_model=32, d_inner=64, mem_len=64,
        dropout=0.0, init_std=0.3, proj_init_std=0.3,
    )  # fmt: skip
    build_model(config).save_pretrained(folder, vocab)
    return folder


class Clients:
    """Clients that ask until they are told to end; ``seen`` counts what they got."""

    def __init__(self, address: str, n: int, seed: int, length: int) -> None:
        self._address, self._seed, self._length = address, seed, length
        self.sessions: list[list[Asked]] = [[] for _ in range(n)]
        self.seen: Counter[str] = Counter()
        self.longest = 0.0
        self.failures: list[str] = []
        self.is_ending = False
        self.n_waiting = 0

    async def run(self) -> None:
        """Ask, one client for each session."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(HANGS)
        async with httpx.AsyncClient(limits=limits, timeout=timeout) as client:
            await asyncio.gather(*(self._ask(client, n) for n in range(len(self.sessions))))

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        draw = random.Random(f"{self._seed} {number}")
        while not self.is_ending:
            start = draw.randrange(len(LETTERS) - 12)
            prompt = LETTERS[start : start + draw.randint(1, 12)]
            length = draw.randint(1, 2 * self._length - 1)
            asked = Asked(f"s{number}", prompt, draw.randrange(2**31), length)
            key, is_stream = f"{number}-{draw.getrandbits(64):x}", draw.random() < 0.3
            began, turn = time.perf_counter(), len(self.sessions[number])
            while (answer := await self._once(client, asked, key, turn, is_stream)) is None:
                await asyncio.sleep(draw.uniform(0.05, 0.3))
            asked.seconds = time.perf_counter() - began
            asked.text, asked.tokens = answer["text"], answer["token_ids"]
            self.sessions[number].append(asked)
            if draw.random() < 0.1:
                await self._repeat(client, asked, key)

    async def _repeat(self, client: httpx.AsyncClient, asked: Asked, key: str) -> None:
        """Send a request again that was answered."""
        turn = len(self.sessions[int(asked.session[1:])]) - 1
        while (again := await self._once(client, asked, key, turn, False)) is None:
            await asyncio.sleep(0.1)
        self.seen["sent again on purpose"] += 1
        if (again["text"], again["token_ids"]) != (asked.text, asked.tokens):
            self.failures.append(f"{asked.session}: another answer to the same key")

    async def _once(
        self, client: httpx.AsyncClient, asked: Asked, key: str, turn: int, is_stream: bool
    ) -> dict[str, Any] | None:
        """Send a request once; None: it must be sent again."""
        body = {"session": asked.session, "session_turn": turn, "prompt": asked.prompt}
        body |= {"max_tokens": asked.length, "seed": asked.seed, "stream": is_stream}
        began, what = time.perf_counter(), "answered"
        self.n_waiting += 1
        try:
            answer = await asyncio.wait_for(self._post(client, body, key), HANGS)
        except (TimeoutError, httpx.TimeoutException):
            what, answer = "no answer within 10 s", None
            self.failures.append(f"{asked.session}: {what}")
        except httpx.TransportError:
            what, answer = "connection broke", None
        finally:
            self.n_waiting -= 1
            self.longest = max(self.longest, time.perf_counter() - began)
        if isinstance(answer, str):
            what, answer = answer, None
        self.seen[what] += 1
        return answer

    async def _post(
        self, client: httpx.AsyncClient, body: dict[str, Any], key: str
    ) -> dict[str, Any] | str | None:
        url, headers = f"{self._address}/v1/completions", {"Idempotency-Key": key}
        text, tokens, reason = "", [], None
        async with client.stream("POST", url, json=body, headers=headers) as found:
            if found.status_code != 200:
                return self._refused(found.status_code, (await found.aread()).decode())
            if not body["stream"]:
                return json.loads(await found.aread())["choices"][0]
            async for line in found.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                value = json.loads(line[6:])
                if "error" in value:
                    return f"stream ended with {value['error']['code']}"
                for piece in value["choices"]:
                    text += piece["text"]
                    tokens += piece["token_ids"]
                    reason = piece["finish_reason"] or reason
        return {"text": text, "token_ids": tokens} if reason else "stream broke off"

    def _refused(self, status: int, text: str) -> str:
        try:
            code = json.loads(text)["error"]["code"]
        except ValueError:
            code = "of the proxy"
        if status not in AGAIN:
            self.failures.append(f"{status} {code}: {text[:300]}")
        return f"{status} {code}"


class Trouble:
    """What happens to the servers and the store."""

    def __init__(self, members: list[Member], store: Redis, clients: Clients, seed: int) -> None:
        self._members, self._store, self._clients = members, store, clients
        self._draw = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.waiting = 0

    async def run(self, kills: int, lease: float) -> None:
        """Kill and stop so many times."""
        for number in range(kills):
            await asyncio.sleep(self._draw.uniform(0.2, 1.0))
            kind = self._draw.choices([*KINDS], [*KINDS.values()])[0]
            while not (ready := await asyncio.to_thread(self._ready)):
                await asyncio.sleep(0.2)
            # In the midst of requests.
            while not self._clients.n_waiting:
                await asyncio.sleep(0)
            self.waiting += self._clients.n_waiting
            victim = self._draw.choice(ready)
            if kind == "server killed":
                await asyncio.to_thread(victim.kill)
            elif kind == "server stopped":
                await asyncio.to_thread(victim.pause, 1.5 * lease)
            else:
                await asyncio.to_thread(self._store.kill)
                await asyncio.sleep(self._draw.choice((0.0, 0.5, 2.0)))
                await asyncio.to_thread(self._store.start)
            self.done[kind] += 1
            print(f"{number + 1}/{kills} {kind} {self._clients.failures[-1:]}", flush=True)

    def _ready(self) -> list[Member]:
        return [each for each in self._members if each.is_ready]


async def disturb(clients: Clients, trouble: Trouble, arguments: argparse.Namespace) -> float:
    """Let the clients ask while things happen, and a little longer; return the seconds."""
    began = time.perf_counter()
    asking = asyncio.create_task(clients.run())
    causing = asyncio.create_task(trouble.run(arguments.kills, arguments.lease))
    await asyncio.wait([asking, causing], return_when=asyncio.FIRST_COMPLETED)
    if asking.done():
        causing.cancel()
        asking.result()
    await causing
    await asyncio.sleep(2)
    clients.is_ending = True
    await asyncio.wait_for(asking, 120)
    return time.perf_counter() - began


def remembered_wrongly(address: str, alone: Alone, sessions: list[list[Asked]]) -> list[str]:
    """Return the sessions that remember other tokens than were asked and answered."""
    wrong = []
    for asked in sessions:
        read = [t for each in asked for t in (*alone.vocab.encode(each.prompt), *each.tokens)]
        answer = httpx.get(f"{address}/v1/sessions/{asked[0].session}", timeout=60)
        tokens = answer.json().get("tokens", [])
        if not tokens or tokens != read[-len(tokens) :]:
            wrong.append(asked[0].session)
    return wrong


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start all, disturb it, and compare."""
    if arguments.model is None:
        arguments.model = tiny(folder / "model")
    (folder / "redis").mkdir()
    store = Redis(folder / "redis")
    words = ["--session_lease", str(arguments.lease), "--session_snapshot", "200"]
    members, proxy = [], None
    try:
        for _ in range(arguments.servers):
            members.append(Member(arguments.model, store.url, folder, words))
        proxy = Proxy(folder, [each.port for each in members])
        end = time.monotonic() + 120
        while not is_ready(proxy.address):
            if time.monotonic() > end:
                log = (folder / "haproxy.log").read_text()
                raise RuntimeError(f"no server came to be ready: {log}")
            time.sleep(0.1)
        clients = Clients(proxy.address, arguments.clients, arguments.seed, arguments.length)
        trouble = Trouble(members, store, clients, arguments.seed)
        seconds = asyncio.run(disturb(clients, trouble, arguments))
        alone = Alone(arguments.model)
        wrong = remembered_wrongly(proxy.address, alone, clients.sessions)
        compared = compare(alone, clients.sessions)
    finally:
        if proxy:
            proxy.end()
        for each in members:
            each.end()
        store.kill()
    logs = "".join(each.logs() for each in members)
    answers = [each for asked in clients.sessions for each in asked]
    return {
        **{name: getattr(arguments, name) for name in ("servers", "clients")},
        "seconds": round(seconds, 1),
        "lease_seconds": arguments.lease,
        "happened": dict(trouble.done),
        "requests_under_way_when_it_happened": trouble.waiting,
        "answers": len(answers),
        "tokens": sum(len(each.tokens) for each in answers),
        "attempts": dict(clients.seen.most_common()),
        "answer_ms": percentiles([each.seconds for each in answers]),
        "longest_attempt_seconds": round(clients.longest, 2),
        "answers_right": compared["right"],
        "answers_wrong": compared["wrong"],
        "ties": len(compared["ties"]),
        "sessions_that_remember_other_tokens": wrong,
        "failures": clients.failures,
        "appends_refused_by_fencing_number": logs.count("was taken over by another server, as"),
        "tracebacks_in_logs": logs.count("Traceback"),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, nargs="?", help="a model folder; none: a tiny one")
    add("--servers", type=int, default=2)
    add("--clients", type=int, default=8, help="each with a session")
    add("--kills", type=int, default=100, help="and stops")
    add("--lease", type=float, default=2.0, help="seconds")
    add("--length", type=int, default=8, help="tokens of an answer, on average")
    add("--seed", type=int, default=1)
    add("--json", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    if needed := missing():
        raise SystemExit(f"needs {needed}")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    keep_freed_memory()
    # In memory, if there is such a folder: a disk that others use may take seconds for each write.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        result = {"circumstances": circumstances()} | measure(arguments, Path(place))
    if arguments.json:
        write_result_file(arguments.json, result)
    print(json_text(result))
    names = ("answers_wrong", "sessions_that_remember_other_tokens", "failures")
    if bad := [name for name in names if result[name]]:
        raise SystemExit(f"there are {', '.join(bad)}")


if __name__ == "__main__":
    main()
