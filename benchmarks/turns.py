"""Several ways to do the same, each in a process of its own, taking turns.

A process of its own has its own peak of memory. Taking turns, a machine that slows down slows all
ways, and ratios taken turn by turn stay what they are. A program calls itself once more for each
way (``--worker ...``), and that call serves :func:`work`.
"""

import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch


def work(step: Callable[[], object]) -> None:
    """Make a step for each line of the standard input and print its seconds.

    At the end print how many MB the process took at most beyond what it had at first.
    """
    before = _resident_mb("VmRSS")
    for _ in sys.stdin:
        began = time.perf_counter()
        step()
        print(time.perf_counter() - began, flush=True)
    print(before, flush=True)
    print(_resident_mb("VmHWM"), flush=True)


class Worker:
    """A process that makes steps in one way."""

    def __init__(self, program: str, words: Sequence[str]) -> None:
        command = [sys.executable, program, "--worker", *words]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def step(self) -> float:
        """Make a step; return its seconds."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._number()

    def peak(self) -> tuple[float, float]:
        """End the process; return its memory at first and at most, in MB."""
        assert self.process.stdin
        self.process.stdin.close()
        numbers = self._number(), self._number()
        self.process.wait()
        return numbers

    def _number(self) -> float:
        assert self.process.stdout
        return float(self.process.stdout.readline())


def take_turns(
    program: str, ways: dict[str, Sequence[str]], ours: str, *, rounds: int, warm: int
) -> dict[str, Any]:
    """Let the ways take turns.

    Args:
        program: The file that calls :func:`work` after ``--worker``.
        ways: What to hand to each, by name.
        ours: The way that the others are compared with.
        rounds: Turns that count.
        warm: Steps of each before them.

    Returns:
        Medians of the seconds; ratios of the others to ours, median and range; memory.
    """
    workers = {name: Worker(program, words) for name, words in ways.items()}
    for worker in workers.values():
        for _ in range(warm):
            worker.step()
    turns = [{name: worker.step() for name, worker in workers.items()} for _ in range(rounds)]
    ratios = {
        name: sorted(turn[name] / turn[ours] for turn in turns) for name in ways if name != ours
    }
    memory = {name: worker.peak() for name, worker in workers.items()}
    return {
        "seconds": {name: statistics.median(t[name] for t in turns) for name in workers},
        "ratio": {name: statistics.median(x) for name, x in ratios.items()},
        "ratio_range": {name: [x[0], x[-1]] for name, x in ratios.items()},
        "mb_at_first": {name: first for name, (first, _) in memory.items()},
        "peak_mb": {name: peak for name, (_, peak) in memory.items()},
        "mb_taken": {name: peak - first for name, (first, peak) in memory.items()},
    }


def circumstances() -> dict[str, Any]:
    """Say when, how and on what this program runs."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "")
    return {
        "date": str(date.today()),
        "command": "python " + " ".join(sys.argv),
        "processor": names[0] if names else platform.processor(),
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
