"""Another revision of the project, for as long as a ``with`` block lasts."""

import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextmanager
def sources(revision: str) -> Iterator[Path]:
    """Lay the ``src`` of a git revision into a temporary folder; it goes with the block.

    Neither the repository nor the files in it are touched, so nothing is left behind there.
    """
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", revision, "src"]
    archive = subprocess.run(command, capture_output=True)
    if archive.returncode:
        sys.exit(f"--base {revision}: {archive.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
        yield Path(folder) / "src"


def commit(revision: str = "HEAD") -> str:
    """Name the commit of a revision; with a mark if files of ours differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=10"]
    words = ["--dirty"] if revision == "HEAD" else [revision]
    found = subprocess.run([*command, *words], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"
