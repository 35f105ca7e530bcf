"""What lies in the folder of the sessions and is none of their files is not opened."""

import os
import sys

import pytest

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")
httpx = pytest.importorskip("httpx")

from transformer_xl.apps.serve.server import alone_in  # noqa: E402  (they need these)
from transformer_xl.apps.serve.sessions import path_of  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs pipes and links")

KINDS = {
    "folder": lambda path, outside: path.mkdir(),
    "link": lambda path, outside: path.symlink_to(outside),
    "link-to-nothing": lambda path, outside: path.symlink_to(path.with_name("nowhere")),
    "device": lambda path, outside: path.symlink_to("/dev/zero"),
    "pipe": lambda path, outside: os.mkfifo(path),
}


@pytest.fixture
def outside(tmp_path):
    path = tmp_path / "outside"
    path.write_bytes(b"a secret")
    yield path
    assert path.read_bytes() == b"a secret"


def code_of(server, name):
    body = {"prompt": "abc", "session": name, "max_tokens": 2}
    answer = httpx.post(f"{server.address}/v1/completions", json=body, timeout=60)
    return answer.status_code, answer.json().get("error", {}).get("code")


def test_nothing_but_a_regular_file_is_a_session(made, run_server, tmp_path, outside):
    folder = tmp_path / "sessions"
    for kind, put in KINDS.items():
        path = path_of(folder, kind)
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, outside)
    # Also in place of the folder of some.
    (tmp_path / "elsewhere").mkdir()
    path_of(folder, "below-a-link").parent.symlink_to(tmp_path / "elsewhere")
    with run_server(made, sessions=folder) as server:
        assert code_of(server, "usual") == (200, None)
        for name in (*KINDS, "below-a-link"):
            assert code_of(server, name) == (507, "session_not_saved"), name
        (found,) = httpx.get(f"{server.address}/v1/sessions").json()["data"]
        assert found["id"] == "usual"
        # What takes the place of a file later is not opened.
        for kind, put in KINDS.items():
            path_of(folder, "usual").unlink(missing_ok=True)
            put(path_of(folder, "usual"), outside)
            assert code_of(server, "usual") == (409, "session_not_a_file"), kind
            if kind == "folder":
                path_of(folder, "usual").rmdir()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_lock_of_the_folder_is_a_file(tmp_path, outside):
    for kind, put in KINDS.items():
        (tmp_path / kind).mkdir()
        put(tmp_path / kind / ".lock", outside)
        said = pytest.raises(OSError, match=r"\.lock is (a|an) .*, and no lock: delete it")
        with said, alone_in(tmp_path / kind):
            pass
