"""A stream of a million tokens: killed, restored, forked, rewound, it is the same to the last bit.

    python benchmarks/long_stream.py shakespeare --json long_stream.json --chart long_stream.svg
    python benchmarks/long_stream.py --base --tokens 20000 --json long_stream_base.json

A process writes the stream and saves its state every ``--save_every`` tokens. It is killed
(SIGKILL) ``--kills`` times, at random, and started again from the file. Another process writes the
same stream undisturbed, and takes the time and the memory of each hundredth. Both must end with
the same tokens and the same state. At ten places of the stream

* a copy goes on for 200 tokens, while the stream does,
* the state is rewound by 200 tokens, which are then read again: keys and values must be the same,
* the state is saved, loaded, and goes on for 200 tokens,

and saving, loading, forking and rewinding are timed. ``--base`` takes random weights of the paper's
WikiText-103 base model with a memory of 2,048, of which a token takes 20 ms: its times are what
counts.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from drawing import lines_svg
from result_file import rounded, write_result_file
from turns import circumstances

from transformer_xl import ModelConfig, Sampling, State, TransformerXL, load_vocab
from transformer_xl.config.files import replace_file
from transformer_xl.data import train_vocab
from transformer_xl.inference.generate import from_pretrained, generate
from transformer_xl.model import Decoder, ModelFolder

BASE = ModelConfig(
    vocab_size=256, n_layer=16, n_head=10, d_model=410, d_inner=2100, mem_len=2048, dropout=0.0
)
SAMPLING = Sampling(temperature=0.9)
CHECKED = 200
"""Tokens by which copies go on and states are rewound."""
PLACES = 10


class Stream:
    """The model, and how it goes on."""

    def __init__(self, name: str) -> None:
        self.model, self.vocab = from_pretrained(name)
        self.weights = ModelFolder.find(name).weights.checksum

    def go_on(
        self, state: State | None, n: int, seed: int | None = None
    ) -> tuple[list[int], State]:
        """Return the next tokens, and the state behind them."""
        prompt = [0] if state is None else []
        seed = 1 if state is None else seed
        how = {"length": n, "seed": seed, "rewindable": CHECKED}
        text = generate(self.model, prompt, SAMPLING, state=state, **how)
        return list(text), text.state

    def load(self, path: Path) -> State | None:
        """Return the state in a file; None: there is none."""
        return State.load(path, self.weights, self.model) if path.exists() else None


def write(stream: Stream, path: Path, n: int, save_every: int) -> None:
    """Write the stream on from its file, and save it on the way."""
    state = stream.load(path)
    while state is None or state.n_tokens <= n:
        _, state = stream.go_on(state, save_every)
        state.save(path, stream.weights)


def killed(name: str, path: Path, n: int, save_every: int, kills: int) -> int:
    """Write the stream by processes that are killed, and a last one; return how often."""
    words = [sys.executable, __file__, name, "--tokens", str(n), "--save_every", str(save_every)]
    numbers, n_killed = random.Random(1), 0
    seconds = 0.0
    while True:
        started = time.monotonic()
        process = subprocess.Popen([*words, "--write", str(path)])
        try:
            process.wait(None if n_killed == kills else 4 + numbers.random() * max(seconds, 20))
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            n_killed += 1
            seconds = time.monotonic() - started
            continue
        if process.returncode:
            raise SystemExit(f"the stream ended with {process.returncode}")
        return n_killed


def resident() -> float:
    """Return the MB that this process takes."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def check(stream: Stream, state: State, folder: Path, times: dict[str, list[float]]) -> None:
    """Fork, rewind, save and load a state; require the same bits.

    Raises:
        AssertionError: Something differs.
    """

    def clock(name: str, started: float) -> None:
        times.setdefault(name, []).append((time.perf_counter() - started) * 1000)

    assert isinstance(state.source, Decoder)
    started = time.perf_counter()
    state.source.fork()
    clock("fork", started)
    expected, after = stream.go_on(state, CHECKED)
    again, _ = stream.go_on(state, CHECKED)
    assert again == expected, "a second continuation differs"
    started = time.perf_counter()
    before = after.rewind(CHECKED)
    clock("rewind", started)
    again, reread = stream.go_on(before, CHECKED, seed=5)
    other, _ = stream.go_on(state, CHECKED, seed=5)
    assert again == other, "a rewound stream differs"
    path = folder / "check.safetensors"
    started = time.perf_counter()
    state.save(path, stream.weights)
    clock("save", started)
    started = time.perf_counter()
    path.read_bytes()
    clock("reading the file", started)
    started = time.perf_counter()
    loaded = State.load(path, stream.weights, stream.model)
    clock("load", started)
    assert loaded.checksum == state.checksum, "a loaded state differs"
    again, _ = stream.go_on(loaded, CHECKED)
    assert again == expected, "a loaded stream differs"
    assert reread.n_tokens == after.n_tokens


def undisturbed(stream: Stream, n: int, save_every: int, folder: Path) -> dict[str, Any]:
    """Write the stream; return time and memory of each part, and the times of the checks."""
    state, part = None, max(n // 100 // save_every, 1) * save_every
    places, times = range(part, n + 1, max(n // PLACES // part, 1) * part), {}
    points: list[list[float]] = []
    while state is None or state.n_tokens <= n:
        started = time.perf_counter()
        for _ in range(part // save_every):
            _, state = stream.go_on(state, save_every)
        points.append(
            [state.n_tokens - 1, (time.perf_counter() - started) / part * 1e6, resident()]
        )
        if state.n_tokens - 1 in places:
            check(stream, state, folder, times)
    assert state is not None
    return {
        "checksum": state.checksum,
        "state_bytes": state.nbytes,
        "microseconds_and_mb": points,
        "ms": {name: statistics.median(x) for name, x in times.items()},
        "places": len(times["fork"]),
    }


def base_model(folder: Path) -> str:
    """Write the base model with random weights; return its folder."""
    torch.manual_seed(0)
    TransformerXL(BASE).save_pretrained(folder, train_vocab("bytes", [""]))
    assert len(load_vocab(folder)) == BASE.vocab_size
    return str(folder)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="shakespeare")
    parser.add_argument("--base", action="store_true", help="random weights of the base model")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--save_every", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--chart", type=Path, help="draw the time of a token there")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        write(Stream(given.model), given.write, given.tokens, given.save_every)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        name = base_model(folder / "base") if given.base else given.model
        stream = Stream(name)
        found = undisturbed(stream, given.tokens, given.save_every, folder)
        path = folder / "killed.safetensors"
        n_killed = killed(name, path, given.tokens, given.save_every, given.kills)
        last = stream.load(path)
        assert last is not None
        assert last.checksum == found.pop("checksum"), "the killed stream differs"
        points = found["microseconds_and_mb"]
        tenth = max(len(points) // 10, 1)
        first, end = points[tenth : 2 * tenth] or points, points[-tenth:]
        found |= {
            "kills": n_killed,
            "last_tenth_of_the_second": {
                name: statistics.mean(x[k] for x in end) / statistics.mean(x[k] for x in first)
                for k, name in ((1, "time"), (2, "memory"))
            },
        }
    result = rounded(circumstances() | {"model": "base" if given.base else name} | found)
    if given.json:
        write_result_file(given.json, result)
    if given.chart:
        lines = {"microseconds a token": [point[:2] for point in points]}
        replace_file(given.chart, lines_svg(lines, low=0, digits=0).encode())
    print(json.dumps({x: y for x, y in result.items() if x != "microseconds_and_mb"}, indent=1))


if __name__ == "__main__":
    main()
