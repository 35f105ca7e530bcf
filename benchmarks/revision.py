"""Another revision of the project, for as long as a ``with`` block lasts."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextmanager
def sources(revision: str) -> Iterator[Path]:
    """Lay the ``src`` of a git revision into a temporary folder; it goes with the block.

    Neither the repository nor the files in it are touched, so nothing is left behind there.
    """
    try:
        archive = _git("archive", "--format=tar", revision, "src")
    except FileNotFoundError:
        sys.exit(f"--base {revision}: there is no git here")
    if archive.returncode:
        sys.exit(f"--base {revision}: {archive.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
        _copy_compiled(Path(folder))
        yield Path(folder) / "src"


def _copy_compiled(folder: Path) -> None:
    """Give a revision our compiled step, if its sources are the same; say so if they are not."""
    ours, theirs = (root / "src/transformer_xl/ops" for root in (ROOT, folder))
    compiled = [*ours.glob("native*.cpp"), *ours.glob("native*.h")]
    if all((theirs / x.name).exists() and _is_equal(x, theirs / x.name) for x in compiled):
        for library in ours.glob("_native_*.so"):
            shutil.copy(library, theirs)
    else:
        print("that revision has another compiled step, and goes without", file=sys.stderr)


def _is_equal(one: Path, other: Path) -> bool:
    return one.read_bytes() == other.read_bytes()


def commit(revision: str = "HEAD") -> str:
    """Name the commit of a revision; with a mark if files of ours differ from it.

    Where git or its folder is missing, as in a copy on another machine, ``TXL_REVISION`` of the
    environment names the present one.
    """
    words = ["--dirty"] if revision == "HEAD" else [revision]
    with suppress(FileNotFoundError):
        found = _git("describe", "--always", "--abbrev=10", *words).stdout.decode().strip()
        if found:
            return found
    known = os.environ.get("TXL_REVISION") if revision == "HEAD" else None
    return known or "unknown"


def _git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True)
