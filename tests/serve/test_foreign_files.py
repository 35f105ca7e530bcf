"""What lies in the folder of the sessions and is none of their files is not opened."""

import os
import socket
import sys

import pytest

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")
httpx = pytest.importorskip("httpx")
sessions = pytest.importorskip("transformer_xl.apps.serve.session_store")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs pipes and links")


def put(path, kind, outside):
    """Put something else in place of a file."""
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(outside)
    elif kind == "link to nothing":
        path.symlink_to(path.with_name("nowhere"))
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.open(path.parent, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as bound:
            # A path to a socket has at most 108 bytes.
            bound.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


KINDS = ["folder", "link", "link to nothing", "link to itself", "device", "pipe", "socket"]


def post(server, name):
    body = {"prompt": "abc", "session": name, "max_tokens": 2}
    return httpx.post(f"{server.address}/v1/completions", json=body, timeout=60)


def test_nothing_but_a_regular_file_is_a_session(made, run_server, tmp_path):
    folder, outside = tmp_path / "sessions", tmp_path / "outside"
    outside.write_bytes(b"a secret")
    places = {kind: sessions.path_of(folder, kind.replace(" ", "-")) for kind in KINDS}
    for kind, path in places.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, kind, outside)
    # Also in place of the folder of some.
    linked = sessions.path_of(folder, "below-a-link").parent
    (tmp_path / "elsewhere").mkdir()
    linked.symlink_to(tmp_path / "elsewhere")
    with run_server(made, sessions=folder) as server:
        assert post(server, "usual").status_code == 200
        for kind in KINDS:
            answer = post(server, kind.replace(" ", "-"))
            assert answer.status_code == 409, kind
            assert answer.json()["error"]["code"] == "session_not_a_file"
        answer = post(server, "below-a-link")
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "session_not_saved")
        found = httpx.get(f"{server.address}/v1/sessions").json()["data"]
        assert [each["id"] for each in found] == ["usual"]
    assert outside.read_bytes() == b"a secret"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_what_takes_the_place_of_a_file_later_is_not_opened(made, run_server, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"a secret")
    with run_server(made, sessions=tmp_path / "sessions") as server:
        for kind in KINDS:
            name = kind.replace(" ", "-")
            assert post(server, name).status_code == 200, kind
            path = sessions.path_of(tmp_path / "sessions", name)
            path.unlink()
            put(path, kind, outside)
            for answer in (post(server, name), httpx.get(f"{server.address}/v1/sessions/{name}")):
                found = (answer.status_code, answer.json()["error"]["code"])
                assert found == (409, "session_not_a_file"), kind
    assert outside.read_bytes() == b"a secret"


def test_the_lock_of_the_folder_is_a_file(tmp_path):
    from transformer_xl.apps.serve.server import alone_in

    outside = tmp_path / "outside"
    outside.write_bytes(b"a secret")
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        put(tmp_path / kind / ".lock", kind, outside)
        said = pytest.raises(OSError, match=r"\.lock is (a|an) .*, and no lock: delete it")
        with said, alone_in(tmp_path / kind):
            pass
        assert outside.read_bytes() == b"a secret", kind
