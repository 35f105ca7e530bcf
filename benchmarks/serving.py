"""txl serve under load: no wrong token, how fast, and what a kill or thousands of sessions do.

    python benchmarks/serving.py runs/demo --json serving.json
    python benchmarks/serving.py runs/demo --requests 4000 --kill --pile 5000

A server process of its own is asked by many clients at once, each with a session of its own. Every
answer is compared with what the same model writes alone, one text after the other, in this process;
that is also the pace of one at a time, and so is the server with one client. Where two tokens are
as likely as each other but for rounding, the two may differ: such answers are counted, shown, and
checked to be ties.

--kill: the server is killed (SIGKILL) in the midst of the load and started again; every session
must then be at its last answer that was finished (an answer is finished when its session is on the
disk) or at the one that was just saved, and go on from there with no wrong token.
--pile: so many sessions, one short request each, and the resident memory of the server meanwhile.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from turns import circumstances

from transformer_xl.generate import generate, open_folder
from transformer_xl.nn import KeptMemory, Memory

LETTERS = "the quick brown fox jumps over the lazy dog and then it sleeps for a while in the sun "


@dataclass
class Asked:
    """A request of a session, and its answer."""

    session: str
    prompt: str
    seed: int
    length: int
    text: str | None = None
    tokens: list[int] = field(default_factory=list)
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

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal and wait."""
        self.process.send_signal(number)
        self.process.wait(120)


def work(arguments: argparse.Namespace) -> list[list[Asked]]:
    """Return what each session asks, one request after the other."""
    draw = random.Random(arguments.seed)
    per_session = max(1, arguments.requests // arguments.sessions)
    found = []
    for number in range(arguments.sessions):
        asked = []
        for _ in range(per_session):
            start = draw.randrange(len(LETTERS) - 30)
            prompt = LETTERS[start : start + draw.randint(1, 24)]
            length = draw.randint(1, 2 * arguments.length - 1)
            asked.append(Asked(f"s{number}", prompt, draw.randrange(2**31), length))
        found.append(asked)
    return found


async def ask(client: httpx.AsyncClient, asked: Asked) -> None:
    """Ask, and read the answer as it comes."""
    body = {
        "prompt": asked.prompt,
        "max_tokens": asked.length,
        "seed": asked.seed,
        "session": asked.session,
        "stream": True,
    }
    started, text, tokens, reason = time.perf_counter(), "", [], None
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            value = json.loads(line[6:])
            if "error" in value:
                raise RuntimeError(value["error"]["message"])
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
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as client:

        async def one(asked: list[Asked]) -> None:
            for each in asked:
                await ask(client, each)
                done.append(each)

        results = await asyncio.gather(*map(one, sessions), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


def percentiles(values: list[float]) -> dict[str, float]:
    """Return p50, p95 and p99 in milliseconds."""
    ordered = sorted(values)
    return {
        f"p{p}": round(1000 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 2)
        for p in (50, 95, 99)
    }


class Alone:
    """The model, writing one text after the other."""

    def __init__(self, folder: Path) -> None:
        self.model, self.vocab = open_folder(folder)

    def write(
        self, asked: list[Asked], mems: Memory | KeptMemory | None = None
    ) -> tuple[list[list[int]], list[float]]:
        """Return the tokens of the requests of a session, and for each how near a tie was."""
        found, gaps, last = [], [], []
        for each in asked:
            ids = [*last, *self.vocab.encode(each.prompt)]
            writing = generate(self.model, ids, length=each.length, mems=mems, seed=each.seed)
            tokens = list(writing)
            gaps.append(self._gap(ids, mems, each, tokens))
            found.append(tokens)
            # Where the server drew another token in a tie, the text went on with that one.
            if each.tokens and each.tokens != tokens:
                break
            mems, last = writing.mems, [writing.last_token]
        return found, gaps

    def _gap(
        self, ids: list[int], mems: Memory | KeptMemory | None, each: Asked, tokens: list[int]
    ) -> float:
        """Return how far a random number was from the other token's part, where tokens differ."""
        pairs = enumerate(zip(tokens, each.tokens, strict=False))
        place = next((n for n, (mine, theirs) in pairs if mine != theirs), None)
        if place is None:
            return 0.0
        writing = generate(self.model, ids, length=place, mems=mems, seed=each.seed)
        list(writing)
        given = [writing.last_token] if place else ids
        before = writing.mems if place else mems
        with torch.no_grad():
            out = self.model(torch.tensor([given]), before, ext_len=0)
        assert out.log_probs is not None
        sums = out.log_probs[0, -1].exp().double().cumsum(0)
        numbers = torch.Generator().manual_seed(each.seed)
        number = torch.rand(place + 1, dtype=torch.float64, generator=numbers)[-1]
        low = min(tokens[place], each.tokens[place])
        return abs(float(sums[low] - number * sums[-1]))


def compare(alone: Alone, sessions: list[list[Asked]]) -> dict[str, Any]:
    """Compare all answers with what is written alone; and time that."""
    wrong, ties, right, tokens = [], [], 0, 0
    started = time.perf_counter()
    written = [alone.write([a for a in asked if a.text is not None]) for asked in sessions]
    seconds = time.perf_counter() - started
    for asked, (found, gaps) in zip(sessions, written, strict=True):
        for each, expected, gap in zip(asked, found, gaps, strict=False):
            tokens += len(expected)
            if each.tokens == expected:
                right += 1
            elif 0 < gap < 1e-5:
                ties.append({"session": each.session, "seed": each.seed, "gap": gap})
            else:
                wrong.append({"session": each.session, "prompt": each.prompt, "gap": gap})
    return {
        "right": right,
        "ties": ties,
        "wrong": wrong,
        "alone_tokens": tokens,
        "alone_seconds": round(seconds, 3),
        "alone_tokens_per_second": round(tokens / seconds, 1),
    }


def measure(
    arguments: argparse.Namespace, folder: Path, sessions: list[list[Asked]], *words: str
) -> dict[str, Any]:
    """Load a server; return what that took."""
    server = Process(arguments, folder, *words)
    done: list[Asked] = []
    try:
        warm = [[Asked(f"warm{n}", "the ", n, 8)] for n in range(min(8, len(sessions)))]
        asyncio.run(load(server.address, warm, []))
        started = time.perf_counter()
        asyncio.run(load(server.address, sessions, done))
        seconds = time.perf_counter() - started
    finally:
        server.end()
    tokens = sum(len(each.tokens) for each in done)
    return {
        "requests": len(done),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "requests_per_second": round(len(done) / seconds, 2),
        "latency_ms": percentiles([each.seconds for each in done]),
        "first_token_ms": percentiles([each.first for each in done]),
    }


def kill(arguments: argparse.Namespace, alone: Alone, folder: Path) -> dict[str, Any]:
    """Kill the server in mid-load, start it again, and let all sessions go on."""
    sessions, done = work(arguments), []

    async def part(server: Process) -> None:
        loading = asyncio.create_task(load(server.address, sessions, done))
        while len(done) < sum(map(len, sessions)) // 2 and not loading.done():
            await asyncio.sleep(0.01)
        server.process.kill()
        await asyncio.gather(loading, return_exceptions=True)

    server = Process(arguments, folder)
    asyncio.run(part(server))
    server.end(signal.SIGKILL)
    finished = len(done)
    server = Process(arguments, folder)
    try:
        stood = Counter(stand(alone, server.address, asked) for asked in sessions)
        rest = [[each for each in asked if each.text is None] for asked in sessions]
        asyncio.run(load(server.address, rest, done))
    finally:
        server.end()
    found = compare(alone, sessions)
    return {
        "finished_before_the_kill": finished,
        "sessions": stood,
        "right": found["right"],
        "wrong": found["wrong"],
        "ties": len(found["ties"]),
    }


def stand(alone: Alone, address: str, asked: list[Asked]) -> str:
    """Say where a session is after the kill, and mark what it has read without a word of it.

    Returns:
        ``before``: at its last answer that was finished. ``after``: at the one that was saved when
        the kill came, whose end nobody heard. ``lost``: anywhere else.
    """
    done = [each for each in asked if each.text is not None]
    running = asked[len(done) : len(done) + 1]
    answer = httpx.get(f"{address}/v1/sessions/{asked[0].session}", timeout=60)
    tokens = answer.json()["tokens"] if answer.status_code == 200 else []
    read = [t for each in done for t in (*alone.vocab.encode(each.prompt), *each.tokens)]
    if tokens == read[len(read) - len(tokens) :] and bool(tokens) == bool(done):
        return "before"
    written, _ = alone.write([*done, *running])
    for each, own in zip(running, written[len(done) :], strict=False):
        read += [*alone.vocab.encode(each.prompt), *own]
        if tokens and tokens == read[-len(tokens) :]:
            each.tokens, each.text = own, ""
            return "after"
    return "lost"


def pile(arguments: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Begin more and more sessions; return the server's memory as they pile up."""
    server = Process(arguments, folder, "--sessions_in_memory", "200", "--max_sessions", "1000000")
    rows = []
    try:
        step = max(1, arguments.pile // 10)
        for first in range(0, arguments.pile, step):
            names = range(first, min(first + step, arguments.pile))
            streams = [[Asked(f"p{n}", "the fox ", n, 4) for n in names[k::16]] for k in range(16)]
            asyncio.run(load(server.address, streams, []))
            held = httpx.get(f"{server.address}/metrics").text
            number = re.search(r"^txl_sessions_in_memory (\S+)", held, re.M)
            rows.append(
                {
                    "sessions": first + len(names),
                    "in_memory": float(number[1]) if number else float("nan"),
                    "resident_mb": round(server.resident(), 1),
                }
            )
    finally:
        server.end()
    return rows


def _is_lost(killed: dict[str, Any] | None) -> bool:
    return bool(killed and (killed["wrong"] or killed["sessions"]["lost"]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a model folder or a run folder")
    parser.add_argument("--sessions", type=int, default=64, help="at once")
    parser.add_argument("--requests", type=int, default=2000, help="in all")
    parser.add_argument("--length", type=int, default=16, help="tokens of an answer, on average")
    parser.add_argument("--threads", type=int, default=1, help="of the model, in each process")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--pile", type=int, default=0, help="so many sessions, one request each")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    alone, result = Alone(arguments.model), {"circumstances": circumstances()}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        sessions = work(arguments)
        result["load"] = measure(arguments, folder / "load", sessions)
        result["compared"] = compare(alone, sessions)
        few = work(arguments)[:1]
        result["one_client"] = measure(arguments, folder / "one", few)
        for name, pace in (
            ("one_client", result["one_client"]["tokens_per_second"]),
            ("alone", result["compared"]["alone_tokens_per_second"]),
        ):
            result[f"times_{name}"] = round(result["load"]["tokens_per_second"] / pace, 2)
        if arguments.kill:
            result["kill"] = kill(arguments, alone, folder / "kill")
        if arguments.pile:
            result["pile"] = pile(arguments, folder / "pile")
    text = json.dumps(result, indent=2)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)
    if result["compared"]["wrong"] or _is_lost(result.get("kill")):
        raise SystemExit("there are wrong answers")


if __name__ == "__main__":
    main()
