"""How long OpenMP threads spin, by whether other programs use the processors.

At the end of each operation its threads wait for each other. GNU OpenMP, which torch uses on Linux,
lets them spin for milliseconds, which is fastest alone; but a thread that spins for one that has no
processor keeps it from getting one, and two programs together do less than half the work of one.
With more threads than processors it spins for microseconds only. Idle threads bring that about
while a program runs, without changing the number of threads that compute, on which the last bits of
results depend.
"""

import ctypes
import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Event, Thread

_INTERVAL = 0.25
"""Seconds between two looks at the load."""
_SHARED, _ALONE = 0.05, 0.02
"""Share of the time that a thread waits for a processor: above the first they are shared, below
the second they are not."""
_QUIET_LOOKS = 4
"""Looks that must find them not shared before threads spin again."""


@cache
def follow_load() -> None:
    """From now on, spin briefly while the processors are shared, if that is possible.

    The commands call this; other programs may.
    """
    if reason_against_sleeping() is None:
        Thread(target=_follow, args=(_gnu_openmp(),), daemon=True).start()


def reason_against_sleeping() -> str | None:
    """Return why the load cannot be followed; None if it can. torch must have been imported."""
    # Whoever sets one of these has chosen.
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_THREAD_LIMIT", "OMP_PROC_BIND"):
        if name in os.environ:
            return f"{name} is set"
    if (library := _gnu_openmp()) is None:
        return "torch does not use GNU OpenMP here"
    if library.omp_get_max_threads() < 2:
        return "there is one thread"
    return None if _seconds_waited() else "the system has no statistics of its scheduler"


def _follow(library: ctypes.CDLL) -> None:
    end, n_quiet, n_threads = None, 0, library.omp_get_max_threads()
    before, then = _seconds_waited(), time.monotonic()
    while True:
        time.sleep(_INTERVAL)
        present, now = _seconds_waited(), time.monotonic()
        delay = sum(seconds - before.get(task, seconds) for task, seconds in present.items())
        share = delay / (now - then) / n_threads
        before, then = present, now
        n_quiet = n_quiet + 1 if share < _ALONE else 0
        if share > _SHARED and end is None:
            end = Event()
            Thread(target=_idle, args=(library, end), daemon=True).start()
        elif n_quiet >= _QUIET_LOOKS and end is not None:
            end.set()
            end = None


def _idle(library: ctypes.CDLL, end: Event) -> None:
    """Keep as many sleeping OpenMP threads as make them more than processors, until ``end``."""
    # Any C function, in a parallel region: what it starts lives as long as this thread.
    work = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
    missing = library.omp_get_num_procs() + 1 - library.omp_get_max_threads()
    # This thread takes part, and counts once more than the others.
    library.GOMP_parallel(work, None, max(missing, 1) + 1, 0)
    end.wait()


def _seconds_waited() -> dict[str, float]:
    """Return the seconds that each thread of the process has waited for a processor."""
    seconds: dict[str, float] = {}
    # Threads may end meanwhile; kernels without statistics have no such files.
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError, ValueError, IndexError):
                seconds[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return seconds


def _gnu_openmp() -> ctypes.CDLL | None:
    """Return the GNU OpenMP that torch has loaded, if any; other packages may bring their own."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/maps").read_text("utf-8", "surrogateescape").splitlines()
        mapped = {Path("/" + line.partition("/")[2]) for line in lines if "/" in line}
        folders = {path.parent for path in mapped if path.name.startswith("libtorch_cpu.")}
        libraries = [path for path in mapped if "libgomp" in path.name]
        of_torch = (x for x in libraries if x.parent in folders or len(libraries) == 1)
        return ctypes.CDLL(str(next(of_torch)))
    return None
