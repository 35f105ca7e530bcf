"""Several ways to do the same, each in a process of its own, taking turns.

A process of its own has its own peak of memory. Taking turns, a machine that slows down slows all
ways, and ratios taken turn by turn stay what they are. A program calls itself once more for each
way (``--worker ...``), and that call serves :func:`work`.
"""

import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

import torch


def work(step: Callable[[], object], *, repeats: int = 1, device: str = "cpu") -> None:
    """Make steps for each line of the standard input and print the seconds of one.

    At the end print the MB that the process took at first, and those that it took at most.

    Args:
        step: What is measured.
        repeats: Steps for each line, after one that is not timed; the seconds are their mean.
        device: On a GPU, time is taken when it has done its work, and memory is the tensors'.
    """
    is_gpu = device != "cpu"
    # As the commands do, and for all alike; a revision may be older than this.
    with suppress(ImportError):
        from transformer_xl.device import keep_freed_memory

        keep_freed_memory()
    before = torch.cuda.memory_allocated() / 2**20 if is_gpu else _resident_mb("VmRSS")
    for _ in sys.stdin:
        # While the others had their turns this process slept, and the machine may have taken pages
        # and caches from it. In use a step comes after a step, so that is what is timed.
        step()
        began = _now(is_gpu)
        for _ in range(repeats):
            step()
        print((_now(is_gpu) - began) / repeats, flush=True)
    print(before, flush=True)
    print(torch.cuda.max_memory_allocated() / 2**20 if is_gpu else _resident_mb("VmHWM"))


def _now(is_gpu: bool) -> float:
    if is_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


class Worker:
    """A process that makes steps in one way.

    Args:
        program: The file that calls :func:`work` after ``--worker``.
        words: What it is handed after that.
        paths: Folders in which it looks for modules first.
    """

    def __init__(self, program: str, words: Sequence[str], paths: Sequence[Path] = ()) -> None:
        self.command = [sys.executable, program, "--worker", *words]
        known = os.environ.get("PYTHONPATH")
        folders = [*map(str, paths), *([known] if known else [])]
        # A session of its own: Ctrl-C reaches this process alone, and it ends the others.
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
            start_new_session=True,
        )

    def step(self) -> float:
        """Make a step; return its seconds."""
        assert self.process.stdin
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self._fail()
        return self._number()

    def peak(self) -> tuple[float, float]:
        """End the process; return its memory at first and at most, in MB."""
        assert self.process.stdin
        self.process.stdin.close()
        return self._number(), self._number()

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        # What was not read any more cannot be written, either.
        with suppress(BrokenPipeError), self.process:
            pass

    def _number(self) -> float:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self._fail()
        return float(line)

    def _fail(self) -> NoReturn:
        sys.exit(f"this process failed, see above: {' '.join(self.command)}")


def take_turns(
    program: str,
    ways: Mapping[str, Sequence[str]],
    ours: str,
    *,
    rounds: int,
    warm: int,
    paths: Mapping[str, Sequence[Path]] | None = None,
) -> dict[str, Any]:
    """Let the ways take turns.

    Args:
        program: The file that calls :func:`work` after ``--worker``.
        ways: What to hand to each, by name.
        ours: The way that the others are compared with.
        rounds: Turns that count.
        warm: Turns of each before them.
        paths: Folders in which a way looks for modules first, by its name.

    Returns:
        Medians of the seconds; ratios of the others to ours, median and range; memory.
    """
    workers: dict[str, Worker] = {}
    try:
        for name, words in ways.items():
            workers[name] = Worker(program, words, (paths or {}).get(name, ()))
            for _ in range(warm):
                workers[name].step()
        turns = [{name: worker.step() for name, worker in workers.items()} for _ in range(rounds)]
        memory = {name: worker.peak() for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.kill()
    ratios = {
        name: sorted(turn[name] / turn[ours] for turn in turns) for name in ways if name != ours
    }
    return {
        "seconds": {name: statistics.median(t[name] for t in turns) for name in workers},
        "ratio": {name: statistics.median(x) for name, x in ratios.items()},
        "ratio_range": {name: [x[0], x[-1]] for name, x in ratios.items()},
        "mb_at_first": {name: first for name, (first, _) in memory.items()},
        "peak_mb": {name: peak for name, (_, peak) in memory.items()},
        "mb_taken": {name: peak - first for name, (first, peak) in memory.items()},
    }


def circumstances(device: str = "cpu") -> dict[str, Any]:
    """Say when, how and on what this program runs."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "")
    processor = names[0] if names else platform.processor()
    if device != "cpu":
        processor = torch.cuda.get_device_name()
    return {
        "date": str(date.today()),
        "command": shlex.join(["python", *sys.argv]),
        "processor": processor,
        "bfloat16_instructions": "avx512_bf16" in flags or "amx_bf16" in flags,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _resident_mb(which: str) -> float:
    # Not getrusage, whose peak begins with that of the process which started this one.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) / 1024
    raise OSError("this system does not tell the peak of a process's memory")
