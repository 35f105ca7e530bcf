"""Locks between processes."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from transformer_xl.config.files import NotRegularError
from transformer_xl.config.locking import locked

HOLDER = """
import sys, time
from pathlib import Path
from transformer_xl.config.locking import locked
with locked(Path(sys.argv[1]), "held"):
    print("mine", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".lock"


@pytest.fixture
def holder(path: Path):
    """Another process, which holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"mine\n"
    yield process
    process.kill()
    process.communicate()


def test_what_another_process_holds_is_refused_or_waited_for(path, holder):
    with pytest.raises(RuntimeError, match="held elsewhere"), locked(path, "held elsewhere"):
        pass
    said = []

    def kill(text):
        said.append(text)
        holder.kill()

    # A lock ends with the process, even if that is killed.
    with locked(path, "held elsewhere", kill):
        assert holder.wait() < 0
    assert said == ["held elsewhere"]


def test_a_lock_is_free_after_an_error(path):
    with pytest.raises(KeyError), locked(path, "held"):
        raise KeyError
    with locked(path, "held"), pytest.raises(RuntimeError), locked(path, "held"):
        pass


def failing(monkeypatch, number):
    """Let no lock be acquired."""

    def acquire(*about, **how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(FileLock, "acquire", acquire)


@pytest.mark.parametrize("wait", [None, print])
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_there_are_no_locks_nobody_waits(path, monkeypatch, number, wait):
    failing(monkeypatch, number)
    with locked(path, "held", wait), locked(path, "held", wait):
        pass


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_a_lock_is_a_file(path, tmp_path, kind):
    outside = tmp_path / "outside"
    outside.write_bytes(b"text")
    {
        "link": lambda: path.symlink_to(outside),
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
    }[kind]()
    with pytest.raises(NotRegularError, match="and no lock: delete it"), locked(path, "held"):
        pass
    assert outside.read_bytes() == b"text"
