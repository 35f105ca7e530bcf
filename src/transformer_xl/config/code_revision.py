"""The git revision of the package, where it runs from a checkout."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path

_SOURCES = Path(__file__).resolve().parents[2]


def revision() -> str | None:
    """Return the commit of the sources, with ``-dirty`` if tracked files were changed.

    None: they are no checkout, or git is not installed.
    """
    root = _SOURCES.parent
    if _SOURCES.name != "src" or not (root / ".git").exists():
        return None
    words = ["git", "-C", str(root), "describe", "--always", "--abbrev=10", "--dirty"]
    # Without locks, git writes nothing there.
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    with suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=60)
        return found.stdout.strip() or None
    return None
