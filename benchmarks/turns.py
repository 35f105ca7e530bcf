"""Several ways to do the same, each in a process of its own, taking turns.

A process of its own has its own peak of memory. Taking turns, a machine that slows down slows all
ways, and ratios taken turn by turn stay what they are. A program calls itself once more for each
way (``--worker ...``), and that call serves :func:`work`. A way that fails is left out, and the
others go on.
"""

import json
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
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch


def work(
    step: Callable[[], object], *, repeats: int = 1, device: str = "cpu", records: bool = False
) -> None:
    """Make steps for each line of the standard input and print the seconds of one.

    At the end print, as JSON, the MB that the process took at first and at most, and whether its
    steps were recorded.

    Args:
        step: What is measured.
        repeats: Steps for each line, after one that is not timed; the seconds are their mean.
        device: On a GPU, time is taken when it has done its work, and memory is the tensors'.
        records: On a GPU, record the step once and replay it, so that what is timed is its kernels
            and not Python, which launches them.
    """
    is_gpu = device != "cpu"
    # As the commands do, and for all alike; a revision may be older than this.
    for name in ("transformer_xl.config.device", "transformer_xl.device"):
        with suppress(ImportError, AttributeError):
            import_module(name).keep_freed_memory()
    before = torch.cuda.memory_allocated() / 2**20 if is_gpu else _resident_mb("VmRSS")
    replay = recorded(step) if is_gpu and records else None
    step = replay or step
    for _ in sys.stdin:
        # While the others had their turns this process slept, and the machine may have taken pages
        # and caches from it. In use a step comes after a step, so that is what is timed.
        step()
        began = _now(is_gpu)
        for _ in range(repeats):
            step()
        print((_now(is_gpu) - began) / repeats, flush=True)
    most = torch.cuda.max_memory_allocated() / 2**20 if is_gpu else _resident_mb("VmHWM")
    print(json.dumps({"at_first": before, "most": most, "is_recorded": replay is not None}))


def recorded(step: Callable[[], object]) -> Callable[[], object] | None:
    """Record a step on a GPU; return what replays it, or None, with the reason on stderr."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    # What is compiled, chosen or allocated once is not to be recorded.
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        told = str(error).splitlines()[0]
        print(f"cannot be recorded, timed with its launches: {told}", file=sys.stderr)
        return None
    return graph.replay


def _now(is_gpu: bool) -> float:
    if is_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


class WorkerError(Exception):
    """A process that made steps has ended before its time."""


class Worker:
    """A process that makes steps in one way; what asks it for them raises a WorkerError.

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

    def ask(self) -> None:
        """Tell it to make a step."""
        assert self.process.stdin
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self._fail()

    def answer(self) -> float:
        """Wait for the step; return its seconds."""
        return float(self._line())

    def step(self) -> float:
        """Make a step; return its seconds."""
        self.ask()
        return self.answer()

    def end(self) -> dict[str, Any]:
        """End the process; return what it says last."""
        assert self.process.stdin
        self.process.stdin.close()
        return json.loads(self._line())

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        # What was not read any more cannot be written, either.
        with suppress(BrokenPipeError), self.process:
            pass

    def _line(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self._fail()
        return line

    def _fail(self) -> NoReturn:
        raise WorkerError(f"this process failed, see above: {' '.join(self.command)}")


def take_turns(
    program: str,
    ways: Mapping[str, Sequence[str]],
    ours: str,
    *,
    rounds: int,
    warm: int,
    paths: Mapping[str, Sequence[Path]] | None = None,
    warm_together: bool = False,
) -> dict[str, Any]:
    """Let the ways take turns. One that fails is left out, with a line on stderr.

    Args:
        program: The file that calls :func:`work` after ``--worker``.
        ways: What to hand to each, by name.
        ours: The way that the others are compared with.
        rounds: Turns that count.
        warm: Turns of each before them.
        paths: Folders in which a way looks for modules first, by its name.
        warm_together: All make those at once: for a GPU, where they compile, each on a core.

    Returns:
        Seconds, median and range; ratios of the others to ours, median and range; memory; whether
        steps were recorded; which ways failed.
    """
    workers: dict[str, Worker] = {}

    def each(do: Callable[[Worker], Any]) -> dict[str, Any]:
        done = {}
        for name, worker in [*workers.items()]:
            try:
                done[name] = do(worker)
            except WorkerError as error:
                print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
                workers.pop(name).kill()
        return done

    try:
        for name, words in ways.items():
            workers[name] = Worker(program, words, (paths or {}).get(name, ()))
        for _ in range(warm):
            if warm_together:
                each(Worker.ask)
                each(Worker.answer)
            else:
                each(Worker.step)
        turns = [each(Worker.step) for _ in range(rounds)]
        last = each(Worker.end)
    finally:
        for worker in workers.values():
            worker.kill()
    if not last:
        sys.exit(f"all ways failed: {', '.join(ways)}")
    seconds = {name: [turn[name] for turn in turns] for name in last}
    ratios = {
        name: sorted(turn[name] / turn[ours] for turn in turns)
        for name in last
        if name != ours and ours in last
    }
    memory = {name: (said["at_first"], said["most"]) for name, said in last.items()}
    return {
        "seconds": {name: statistics.median(x) for name, x in seconds.items()},
        "seconds_range": {name: [min(x), max(x)] for name, x in seconds.items()},
        "ratio": {name: statistics.median(x) for name, x in ratios.items()},
        "ratio_range": {name: [x[0], x[-1]] for name, x in ratios.items()},
        "mb_at_first": {name: first for name, (first, _) in memory.items()},
        "peak_mb": {name: most for name, (_, most) in memory.items()},
        "mb_taken": {name: most - first for name, (first, most) in memory.items()},
        "is_recorded": {name: said["is_recorded"] for name, said in last.items()},
        "failed": [name for name in ways if name not in last],
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
    # Folders of the machine are left out.
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv]
    return {
        "date": str(date.today()),
        "command": shlex.join(["python", *words]),
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
