"""Child processes with limits on memory and processor time, for what hostile files can ask for."""

import os
import sys
import time
from contextlib import suppress

# Where programs, libraries and temporary files are, how text is encoded, and what time it is.
_KEPT = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
_KEPT += ("TMPDIR", "TEMP", "TMP", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
_KEPT += ("PYTHONUTF8", "PYTHONIOENCODING")


def command_of(call: str) -> list[str]:
    """Return the command of a child process that executes a line of Python.

    With -P it imports nothing from the current folder, which may be hostile.
    """
    return [sys.executable, "-P", "-c", call]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a child process that imports what this one does.

    It has what Python needs to start, and none of the rest, which can be passwords and keys.
    """
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | more


def limit_this_process(n_bytes: int, seconds: int) -> None:
    """Limit the memory of this process, and its processor time from now on.

    That is as far as the system can: Windows cannot, macOS only the time. So the parent process has
    to limit the time in any case.

    Args:
        n_bytes: Bytes of its address space.
        seconds: Seconds that its threads may take together; then the system ends it.
    """
    try:
        import resource
    except ImportError:
        return
    until = int(time.process_time()) + seconds
    limits = {"RLIMIT_AS": n_bytes, "RLIMIT_CPU": until, "RLIMIT_CORE": 0}
    for name, most in limits.items():
        with suppress(ValueError, OSError):
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            # A lower limit, as of a shell with `ulimit -v`, can only be kept.
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            # The soft limit alone, as a process that does one piece of work after another raises
            # that of the time.
            resource.setrlimit(kind, (most, hard))
