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
"""Seconds between two measurements of the load."""
_SHARED, _ALONE = 0.05, 0.02
"""Share of the time that a thread waits for a processor: above the first the processors are shared,
below the second they are not."""
_QUIET_INTERVALS = 4
"""Intervals in a row in which the processors are not shared, before threads spin again."""


@cache
def adapt_spinning_to_load() -> None:
    """Start a thread that lets OpenMP spin only briefly while the processors are shared.

    No effect where :func:`reason_against_sleeping` returns a reason. Call it in the thread that
    computes, after its number of threads is set: in GNU OpenMP each thread has a number of its own.
    The commands call this; other programs may.
    """
    if reason_against_sleeping() is None:
        library = _gnu_openmp()
        assert library is not None
        n_threads = library.omp_get_max_threads()
        Thread(target=_monitor_load, args=(library, n_threads), daemon=True).start()


def reason_against_sleeping() -> str | None:
    """Return why idle threads cannot make OpenMP spin briefly; None if they can.

    It is for the calling thread; torch must have been imported.
    """
    # Whoever sets one of these has chosen.
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_THREAD_LIMIT", "OMP_PROC_BIND"):
        if name in os.environ:
            return f"{name} is set"
    if (library := _gnu_openmp()) is None:
        return "torch does not use GNU OpenMP here"
    if library.omp_get_max_threads() < 2:
        return "there is one thread"
    return None if _seconds_waited() else "the system has no statistics of its scheduler"


def _monitor_load(library: ctypes.CDLL, n_threads: int) -> None:
    """Measure the load forever; keep idle threads while the processors are shared.

    Args:
        library: GNU OpenMP.
        n_threads: Number of threads that compute, whose waiting is the load.
    """
    end_of_idling: Event | None = None
    n_quiet = 0
    waited_before, time_before = _seconds_waited(), time.monotonic()
    while True:
        time.sleep(_INTERVAL)
        waited, now = _seconds_waited(), time.monotonic()
        # Threads that are new have not waited before.
        delay = sum(seconds - waited_before.get(task, seconds) for task, seconds in waited.items())
        share = delay / (now - time_before) / n_threads
        waited_before, time_before = waited, now
        n_quiet = n_quiet + 1 if share < _ALONE else 0
        if share > _SHARED and end_of_idling is None:
            end_of_idling = Event()
            arguments = (library, n_threads, end_of_idling)
            Thread(target=_keep_idle_threads, args=arguments, daemon=True).start()
        elif n_quiet >= _QUIET_INTERVALS and end_of_idling is not None:
            end_of_idling.set()
            end_of_idling = None


def _keep_idle_threads(library: ctypes.CDLL, n_threads: int, end: Event) -> None:
    """Keep so many sleeping OpenMP threads that there are more threads than processors.

    Args:
        library: GNU OpenMP.
        n_threads: Number of threads that compute.
        end: Ends the sleeping threads when it is set.
    """
    # Any C function, in a parallel region: the threads of its team live as long as this thread.
    work = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
    n_missing = max(library.omp_get_num_procs() + 1 - n_threads, 1)
    # This thread is a member of the team in addition.
    library.GOMP_parallel(work, None, n_missing + 1, 0)
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
