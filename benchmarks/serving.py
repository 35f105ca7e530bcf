"""txl serve under load: no wrong token, how fast, and what a kill or thousands of sessions do.

    python benchmarks/serving.py runs/demo --json serving.json
    python benchmarks/serving.py runs/demo --requests 4000 --kill --pile 5000

A server process of its own is asked by many clients at once, each with a session of its own, and by
one client alone, which is the pace of one at a time; the two take turns (--rounds), so that a
machine that slows down slows both. Every answer is compared with what the same model writes alone,
one text after the other, in this process. Where two tokens are as likely as each other but for
rounding, the two may differ: such answers are counted, shown, and checked to be ties.

The seconds of the processor are told for the clients and for the server.

--kill: the server is killed (SIGKILL) in the midst of the load and started again; every session
must then be at its last answer that was finished (an answer is finished when its session is on the
disk) or at the one that was just saved, and go on from there with no wrong token.
--pile: so many sessions, one short request each, and the resident memory of the server meanwhile.
"""

import argparse
import asyncio
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import torch
from result_file import json_text, write_result_file
from serving_clients import Asked, Process, Turns, load
from turns import circumstances

from transformer_xl.config.device import keep_freed_memory
from transformer_xl.inference.generate import (
    REWINDABLE,
    Generation,
    State,
    from_pretrained,
    generate,
    prompt_lengths,
)

LETTERS = "the quick brown fox jumps over the lazy dog and then it sleeps for a while in the sun "


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


class Alone:
    """The model, writing one text after the other."""

    def __init__(self, folder: Path) -> None:
        self.model, self.vocab = from_pretrained(folder)

    def write(
        self, asked: list[Asked], state: State | None = None
    ) -> tuple[list[list[int]], list[float]]:
        """Return the tokens of the requests of a session, and for each how near a tie was."""
        found, gaps = [], []
        for each in asked:
            ids = self.vocab.encode(each.prompt)
            writing = self._writing(ids, each.length, state, each)
            tokens = list(writing)
            gaps.append(self._gap(ids, state, each, tokens))
            found.append(tokens)
            # Where the server drew another token in a tie, the text went on with that one.
            if each.tokens and each.tokens != tokens:
                break
            state = writing.state
        return found, gaps

    def _writing(self, ids: list[int], length: int, state: State | None, each: Asked) -> Generation:
        return generate(
            self.model, ids, length=length, state=state, seed=each.seed, rewindable=REWINDABLE
        )

    def _gap(self, ids: list[int], state: State | None, each: Asked, tokens: list[int]) -> float:
        """Return how far a random number was from the other token's part, where tokens differ."""
        pairs = enumerate(zip(tokens, each.tokens, strict=False))
        place = next((n for n, (mine, theirs) in pairs if mine != theirs), None)
        if place is None:
            return 0.0
        writing = self._writing(ids, place, state, each)
        list(writing)
        before, lengths = writing.state, prompt_lengths(self.model, None, REWINDABLE)
        given = torch.tensor([[before.last_token]])
        with torch.no_grad():
            out = self.model(given, before.mems, **lengths.arguments)
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
    for asked, (expected, gaps) in zip(sessions, written, strict=True):
        for each, own, gap in zip(asked, expected, gaps, strict=False):
            tokens += len(own)
            right += each.tokens == own
            if each.tokens != own:
                about = {"session": each.session, "seed": each.seed, "gap": gap}
                (ties if 0 < gap < 1e-5 else wrong).append(about)
    speed = {"alone_seconds": round(seconds, 3), "alone_tokens": tokens}
    speed["alone_tokens_per_second"] = round(tokens / seconds, 1)
    return {"right": right, "ties": ties, "wrong": wrong, **speed}


def measure(
    arguments: argparse.Namespace, folder: Path, sessions: list[list[Asked]], one: list[Asked]
) -> dict[str, Any]:
    """Let all sessions and one client load a server by turns; return what that took."""
    server, many, alone = Process(arguments, folder), Turns(), Turns()
    try:
        warm = [[Asked(f"warm{n}", "the ", n, 8)] for n in range(min(8, len(sessions)))]
        asyncio.run(load(server.address, warm, []))
        for turn in range(arguments.rounds):
            many.take(server, [_part(asked, turn, arguments.rounds) for asked in sessions])
            alone.take(server, [_part(one, turn, arguments.rounds)])
    finally:
        server.end()
    by_many, by_one = many.result(), alone.result()
    spent = [sum(x["processor_ms_per_token"].values()) for x in (by_one, by_many)]
    ratios = [pace / own for pace, own in zip(many.paces, alone.paces, strict=True)]
    return {
        "load": by_many,
        "one_client": by_one,
        "times_one_client": round(by_many["tokens_per_second"] / by_one["tokens_per_second"], 2),
        "times_one_client_each_round": [round(ratio, 2) for ratio in ratios],
        "processor_times_less_per_token": round(spent[0] / spent[1], 2),
    }


def _part(asked: list[Asked], turn: int, turns: int) -> list[Asked]:
    return asked[len(asked) * turn // turns : len(asked) * (turn + 1) // turns]


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
    numbers = {"right": found["right"], "wrong": found["wrong"], "ties": len(found["ties"])}
    return {"finished_before_the_kill": finished, "sessions": stood, **numbers}


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
    server = Process(arguments, folder, "--max_sessions", "1000000")
    rows = []
    try:
        step = max(1, arguments.pile // 10)
        for first in range(0, arguments.pile, step):
            names = range(first, min(first + step, arguments.pile))
            streams = [[Asked(f"p{n}", "the fox ", n, 4) for n in names[k::16]] for k in range(16)]
            asyncio.run(load(server.address, streams, []))
            resident = round(server.resident(), 1)
            rows.append({"sessions": first + len(names), "resident_mb": resident})
    finally:
        server.end()
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, help="a model folder or a run folder")
    add("--sessions", type=int, default=64, help="at once")
    add("--requests", type=int, default=2000, help="in all")
    add("--length", type=int, default=16, help="tokens of an answer, on average")
    add("--rounds", type=int, default=4, help="turns of many and of one client")
    add("--threads", type=int, default=1, help="of the model, in each process")
    add("--seed", type=int, default=1)
    add("--kill", action="store_true")
    add("--pile", type=int, default=0, help="so many sessions, one request each")
    add("--json", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    alone = Alone(arguments.model)
    result: dict[str, Any] = {"circumstances": circumstances()}
    result["weights"] = sum(x.numel() for x in alone.model.parameters())
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        sessions = work(arguments)
        # As many as leave its turns a few seconds each.
        few = max(arguments.rounds, arguments.requests // 16)
        one = work(argparse.Namespace(**vars(arguments) | {"sessions": 1, "requests": few}))[0]
        for each in one:
            each.session = "one"
        result |= measure(arguments, folder / "load", sessions, one)
        result["compared"] = compare(alone, [*sessions, one])
        if arguments.kill:
            result["kill"] = kill(arguments, alone, folder / "kill")
        if arguments.pile:
            result["pile"] = pile(arguments, folder / "pile")
    if arguments.json:
        write_result_file(arguments.json, result)
    print(json_text(result))
    killed = result.get("kill", {"wrong": [], "sessions": Counter()})
    if result["compared"]["wrong"] or killed["wrong"] or killed["sessions"]["lost"]:
        raise SystemExit("there are wrong answers")


if __name__ == "__main__":
    main()
