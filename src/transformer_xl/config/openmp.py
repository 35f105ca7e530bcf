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
from pathlib import Path
from threading import Event, Lock, Thread

INTERVAL = 0.25
"""Seconds between two looks at the load."""
SHARED, ALONE = 0.05, 0.02
"""Share of the time that a thread waits for a processor: above the first they are shared, below
the second they are not."""
QUIET_LOOKS = 4
"""Looks that must find it not shared before threads spin again."""

_TASKS = Path("/proc/self/task")
_starting = Lock()
_running: list[Thread] = []


def follow_load() -> None:
    """From now on, spin briefly while the processors are shared, if that is possible.

    The commands call this; other programs may.
    """
    with _starting:
        if not _running and reason_against_sleeping() is None:
            _running.append(Thread(target=_follow, args=(_gnu_openmp(),), daemon=True))
            _running[0].start()


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
    return None if waited() else "the system has no statistics of its scheduler"


class Load:
    """Decides from the seconds that threads waited whether the processors are shared."""

    def __init__(self) -> None:
        self.is_shared = False
        self._n_quiet = 0

    def look(self, share: float) -> bool:
        """Take the share of the time that a thread waited since the last look."""
        self._n_quiet = self._n_quiet + 1 if share < ALONE else 0
        if share > SHARED:
            self.is_shared = True
        elif self._n_quiet >= QUIET_LOOKS:
            self.is_shared = False
        return self.is_shared


class IdleThreads:
    """As many OpenMP threads as make them more than processors; they sleep until :meth:`stop`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._end, self._started = Event(), Event()
        self._thread = Thread(target=self._idle, args=(library,), daemon=True)
        self._thread.start()
        self._started.wait()

    def _idle(self, library: ctypes.CDLL) -> None:
        # Any C function, in a parallel region: what it starts lives as long as this thread.
        work = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
        missing = library.omp_get_num_procs() + 1 - library.omp_get_max_threads()
        try:
            # This thread takes part, and counts once more than the others.
            library.GOMP_parallel(work, None, max(missing, 1) + 1, 0)
        finally:
            self._started.set()
        self._end.wait()

    def stop(self) -> None:
        """End the threads."""
        self._end.set()
        self._thread.join()


def waited() -> dict[str, float]:
    """Return the seconds that each thread of the process has waited for a processor."""
    seconds: dict[str, float] = {}
    # Threads may end meanwhile; kernels without statistics have no such files.
    with suppress(OSError):
        for task in _TASKS.iterdir():
            with suppress(OSError, ValueError, IndexError):
                text = (task / "schedstat").read_text("ascii")
                seconds[task.name] = int(text.split()[1]) / 1e9
    return seconds


def _follow(library: ctypes.CDLL) -> None:
    load, idle, n_threads = Load(), None, library.omp_get_max_threads()
    before, then = waited(), time.monotonic()
    while True:
        time.sleep(INTERVAL)
        present, now = waited(), time.monotonic()
        delay = sum(seconds - before.get(task, seconds) for task, seconds in present.items())
        is_shared = load.look(delay / (now - then) / n_threads)
        before, then = present, now
        if is_shared and idle is None:
            idle = IdleThreads(library)
        elif not is_shared and idle is not None:
            idle.stop()
            idle = None


def _gnu_openmp() -> ctypes.CDLL | None:
    """Return the GNU OpenMP that torch has loaded, if any; other packages may bring their own."""
    mapped: set[Path] = set()
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text("utf-8", "surrogateescape").splitlines()
        mapped = {Path("/" + line.partition("/")[2]) for line in lines if "/" in line}
    found = [path for path in mapped if "libgomp" in path.name]
    folders = {path.parent for path in mapped if path.name.startswith("libtorch_cpu.")}
    of_torch = [path for path in found if path.parent in folders]
    if not of_torch and len(found) != 1:
        return None
    with suppress(OSError):
        return ctypes.CDLL(str((of_torch or found)[0]))
    return None
