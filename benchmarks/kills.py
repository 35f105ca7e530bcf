"""A run that is killed at any moment, also while it saves, ends as if nothing had happened.

    python benchmarks/kills.py --json kills.json
    python benchmarks/kills.py --recipe mine.toml --processes 2 4 --kills 20

A recipe (a small one that uses all there is, if none is given) is trained to its end once,
undisturbed. Then it is trained again and again and killed (SIGKILL): before a random operation on
its files (opening, renaming, removing), most of which belong to a save, or after a random time; of
several processes sometimes one, sometimes all. After a few kills the run is left to finish, and
must then equal the undisturbed one bit for bit: the weights, the optimizer, the memory, the random
numbers, the lines of the log, the models in its folder. When one of several processes is killed,
the others must end by themselves.

torch is loaded once; each part of a run is forked from there.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from result_file import write_result_file
from turns import circumstances

from transformer_xl.config import Config, DataConfig, ModelConfig, TrainConfig
from transformer_xl.config.recipes import load_recipe
from transformer_xl.data import prepare
from transformer_xl.train import loop, metrics
from transformer_xl.train.checkpoint.checkpoints import read_about, read_whole
from transformer_xl.train.metrics import read_metrics

FILE_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
LONGEST_SECONDS = 120
"""How long the others may take to end when one process was killed."""
HANG_MINUTES = 0.5
"""How long a process waits for one that was killed before the two had met."""
_HUNG = 124

SMALL = Config(
    model=ModelConfig(
        n_layer=2, n_head=2, d_model=16, d_inner=32, mem_len=8, dropout=0.1, attn_dropout=0.1
    ),
    data=DataConfig(path=__file__, vocab="chars"),
    train=TrainConfig(
        steps=8, batch_size=4, segment_len=8, stages=((0.0, 6, 6), (0.6, 8, 8)),
        random_segment_len=True, optimizer="muon", average="tail", average_start=0.4, lr=1e-2,
        log_every=2, eval_every=3, save_every=2, precision="float32",
    ),
)  # fmt: skip


@dataclass
class Kill:
    """When to kill, and whom."""

    victims: range
    at_event: int | None = None
    after_seconds: float | None = None


@dataclass
class Found:
    """What came of the kills of a number of processes."""

    processes: int
    kills: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    wrong: list[str] = field(default_factory=list)
    survivors_seconds: list[float] = field(default_factory=list)


class Runs:
    """Makes runs in forked processes that can be killed."""

    def __init__(self, config: Config, folder: Path, processes: int) -> None:
        self.config, self.folder, self.processes = config, folder, processes
        self._events = folder / "events"

    def part(self, run: Path, kill: Kill | None = None) -> tuple[list[int], float]:
        """Train, and kill as told; return the ends of the processes and how long the last took."""
        port = _free_port()
        children = []
        for rank in range(self.processes):
            child = os.fork()
            if child == 0:
                is_victim = kill is not None and rank in kill.victims
                self._train(run, rank, port, kill.at_event if kill and is_victim else None)
            children.append(child)
        began = time.perf_counter()
        if kill is not None and kill.after_seconds is not None:
            time.sleep(kill.after_seconds)
            for rank in kill.victims:
                os.kill(children[rank], signal.SIGKILL)
            began = time.perf_counter()
        codes = [_end(child, began + LONGEST_SECONDS) for child in children]
        return codes, time.perf_counter() - began

    def _train(self, run: Path, rank: int, port: int, at_event: int | None) -> None:
        code = 1
        try:
            if self.processes > 1:
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                os.environ["WORLD_SIZE"] = str(self.processes)
            done = [0]

            def count(event: str, arguments: tuple[Any, ...]) -> None:
                if event in FILE_EVENTS and (str(run) in str(arguments[0]) or "re" in event):
                    done[0] += 1
                    if done[0] == at_event:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count)
            loop.train(self.config, run, quiet=True)
            if rank == 0:
                self._events.write_text(str(done[0]))
            code = 0
        except BaseException:  # noqa: BLE001  (it is written down)
            # Of a process whose neighbour was killed this is expected.
            with (self.folder / "errors.log").open("a") as log:
                traceback.print_exc(file=log)
        finally:
            os._exit(code)

    def whole(self) -> tuple[int, float]:
        """Make the undisturbed run; return its file operations and its seconds."""
        codes, seconds = self.part(self.folder / "whole")
        if any(codes):
            raise SystemExit(
                f"the undisturbed run failed: {(self.folder / 'errors.log').read_text()}"
            )
        return int(self._events.read_text()), seconds

    def differences(self, run: Path) -> list[str]:
        """Say in what a run differs from the undisturbed one."""
        expected, found = _state(self.folder / "whole"), _state(run)
        return sorted(
            key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)
        )


def measure(config: Config, processes: int, kills: int, in_a_row: int, seed: int) -> Found:
    """Kill a run so many times, ``in_a_row`` times before it may finish."""
    draw, found = random.Random(f"{seed} {processes}"), Found(processes)
    with tempfile.TemporaryDirectory() as temporary:
        runs = Runs(config, Path(temporary), processes)
        n_events, seconds = runs.whole()
        while sum(found.kills.values()) < kills:
            run = runs.folder / "killed"
            for _ in range(in_a_row):
                kill = _drawn(draw, processes, n_events, seconds)
                codes, waited = runs.part(run, kill)
                if _HUNG in codes:
                    found.wrong.append(f"a process did not end after {kill}")
                if not any(code == -signal.SIGKILL for code in codes):
                    # It was done before.
                    continue
                by = "file operation" if kill.at_event is not None else "time"
                found.kills[f"{by}, {len(kill.victims)} of {processes}"] += 1
                if len(kill.victims) < processes and kill.after_seconds is not None:
                    found.survivors_seconds.append(waited)
            codes, _ = runs.part(run)
            wrong = [f"exit codes {codes}"] if any(codes) else runs.differences(run)
            found.runs += 1
            if wrong:
                found.wrong.append(f"run {found.runs}: {', '.join(wrong)}")
            shutil.rmtree(run)
    return found


def _drawn(draw: random.Random, processes: int, n_events: int, seconds: float) -> Kill:
    first = draw.randrange(processes)
    everybody = processes == 1 or draw.random() < 0.3
    victims = range(processes) if everybody else range(first, first + 1)
    if draw.random() < 0.5:
        return Kill(victims, after_seconds=draw.uniform(0, seconds))
    # Only the first process has many: it writes what all have.
    return Kill(range(1), at_event=draw.randrange(1, n_events))


def _state(run: Path) -> dict[str, Any]:
    checkpoints = sorted((run / "checkpoints").iterdir())
    about = read_about(checkpoints[-1])
    for name in ("seconds", "stage_seconds"):
        del about[name]
    records = read_metrics(run / "metrics.jsonl")
    tensors = read_whole(checkpoints[-1], "")
    old = {*checkpoints[:-1]}
    models = {str(x.relative_to(run)): x for x in (run / "model").rglob("*.safetensors")}
    # A kill may leave one old checkpoint more, until the next one is saved.
    names = (x.relative_to(run) for x in run.rglob("*") if not old & {x, *x.parents})
    return {
        "names": sorted(map(str, names)),
        "metrics": [{k: r[k] for k in r if k != "tokens_per_second"} for r in records],
        "about": about,
        **{name: x.numpy().tobytes() for name, x in tensors.items()},
        **{name: path.read_bytes() for name, path in models.items()},
    }


def _end(child: int, until: float) -> int:
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.perf_counter() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return _HUNG
        time.sleep(0.005)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def main() -> None:
    """Kill, compare, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--recipe", help="a small one that saves often")
    add("--processes", type=int, nargs="+", default=[1, 2])
    add("--kills", type=int, default=100, help="for each number of processes")
    add("--in_a_row", type=int, default=4, help="kills before a run may finish")
    add("--seed", type=int, default=0)
    add("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = load_recipe(arguments.recipe) if arguments.recipe else SMALL
    config = replace(config, train=replace(config.train, hang_minutes=HANG_MINUTES))
    metrics.find_spec = lambda name: None  # pyright: ignore[reportAttributeAccessIssue]
    loop.finish = lambda *about: {}
    prepare(config.data)
    began, rows = time.perf_counter(), []
    for processes in arguments.processes:
        found = measure(config, processes, arguments.kills, arguments.in_a_row, arguments.seed)
        row = {"processes": processes, "kills": sum(found.kills.values()), "by": dict(found.kills)}
        row |= {"runs": found.runs, "wrong": found.wrong}
        rows.append(row | {"longest_survivor_seconds": max(found.survivors_seconds, default=None)})
        print(json.dumps(rows[-1]), flush=True)
    if arguments.json:
        about = circumstances() | {"minutes": round((time.perf_counter() - began) / 60, 1)}
        write_result_file(arguments.json, {**about, "rows": rows})
    raise SystemExit(int(any(row["wrong"] for row in rows)))


if __name__ == "__main__":
    main()
