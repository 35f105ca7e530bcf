"""Sessions of one server, in memory and in a folder: limits, files, names, bad files and disks."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from transformer_xl.apps.serve.errors import SessionError
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.sessions import Sessions, path_of
from transformer_xl.inference.generate import State, generate


@pytest.fixture
def state(made):
    writing = generate(made.model, [1, 2, 3], length=20, seed=1)
    list(writing)
    return writing.state


@pytest.fixture(params=["memory", "folder"])
def place(request, tmp_path):
    """Where sessions are stored."""
    return tmp_path if request.param == "folder" else None


def sessions_in(weights, folder=None, *, largest=1, clock=time.time, **limits):
    settings = ServeSettings(sessions=folder, **limits)
    return Sessions(settings, weights, largest=largest, clock=clock)


def put(kept, name, state):
    kept.open(name)
    kept.close(name, state)


def same(one, two):
    return one.checksum == two.checksum


def test_sessions_go_on_from_their_states_and_are_listed_by_use(made, state, tmp_path):
    kept = sessions_in(made.weights, tmp_path)
    for number in range(4):
        put(kept, f"s{number}", replace(state, tokens=np.array([number])))
    # A request that leaves a session as it was counts as a use.
    put(kept, "s1", None)
    put(kept, "s0", None)
    assert [s["id"] for s in kept.all(2)] == ["s0", "s1"]
    for sessions in (kept, sessions_in(made.weights, tmp_path)):
        assert len(sessions) == 4
        for number in range(4):
            assert same(sessions.open(f"s{number}"), replace(state, tokens=np.array([number])))
            sessions.close(f"s{number}")


def test_a_session_has_one_user_at_a_time(made, state, place):
    kept = sessions_in(made.weights, place)
    put(kept, "a", state)
    kept.open("a")
    for use in (kept.open, kept.delete):
        with pytest.raises(SessionError, match="session 'a' is in use"):
            use("a")
    assert kept.describe("a")["is_busy"]
    # To look at it, nobody need wait.
    assert same(kept.peek("a"), state)
    kept.close("a")
    kept.delete("a")
    for use in (kept.peek, kept.describe, kept.delete):
        with pytest.raises(SessionError, match="there is no session 'a'"):
            use("a")
    # One that never began is none, and one whose first answer is not complete is busy.
    kept.open("a")
    with pytest.raises(SessionError, match="session 'a' is in use"):
        kept.peek("a")
    assert kept.describe("a")["is_busy"]
    kept.close("a")
    assert len(kept) == 0
    assert place is None or not list(place.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("in_folder", "limits"),
    [
        (True, {"max_sessions": 2}),
        (False, {"max_sessions": 2}),
        (False, {"session_bytes": 2_500, "largest": 1_000}),
    ],
)
def test_there_is_an_end_to_how_many_there_are(made, state, tmp_path, in_folder, limits):
    kept = sessions_in(made.weights, tmp_path if in_folder else None, **limits)
    put(kept, "a", state)
    kept.open("b")
    with pytest.raises(SessionError, match="there are 2 sessions, as many as may be"):
        kept.open("c")
    kept.close("b", state)
    put(kept, "a", state)


def test_what_nobody_uses_is_deleted(made, state, tmp_path, caplog, monkeypatch):
    now = [1000.0]
    kept = sessions_in(made.weights, tmp_path, session_idle=60, clock=lambda: now[0])
    for name in "abc":
        put(kept, name, state)
    now[0] += 50
    put(kept, "new", state)
    now[0] += 20
    kept.open("c")
    # What cannot be deleted does not keep others from it.
    unlink = Path.unlink

    def fails(path, **how):
        if path == path_of(tmp_path, "a"):
            raise OSError("the disk is gone")
        unlink(path, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fails)
        kept.expire()
    assert "session a cannot be deleted: the disk is gone" in caplog.text
    assert {s["id"] for s in kept.all()} == {"a", "c", "new"}
    kept.close("c", state)
    kept.expire()
    assert [s["id"] for s in kept.all()] == ["c", "new"]
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2


def test_a_session_whose_file_was_removed_is_gone(made, state, tmp_path):
    kept = sessions_in(made.weights, tmp_path)
    for name in "ab":
        put(kept, name, state)
        path_of(tmp_path, name).unlink()
    with pytest.raises(SessionError, match="there is no session 'a'"):
        kept.peek("a")
    assert kept.open("b") is None
    assert not kept.all()
    kept.close("b", state)
    assert same(kept.peek("b"), state)
    # Nor does a folder in its place stay listed, and it is left alone.
    path_of(tmp_path, "b").unlink()
    path_of(tmp_path, "b").mkdir()
    kept.delete("b")
    assert not kept.all()
    assert path_of(tmp_path, "b").is_dir()


def test_sessions_belong_to_the_weights_that_were_loaded(made, make_model, state, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(made.folder, folder)
    weights = folder / made.weights.name
    kept = sessions_in(weights, tmp_path / "sessions")
    put(kept, "a", state)
    # A training run puts a better model there, while this one is served.
    shutil.copy(make_model(init_std=0.3).weights, weights)
    put(kept, "b", state)
    assert same(kept.peek("a"), state)
    again = sessions_in(weights, tmp_path / "sessions")
    for name in "ab":
        with pytest.raises(ValueError, match="made by another model"):
            again.open(name)


def test_files_are_those_of_txl_generate_and_a_damaged_one_is_told(made, state, tmp_path):
    kept = sessions_in(made.weights, tmp_path)
    put(kept, "tale", state)
    (file,) = tmp_path.rglob("*.safetensors")
    assert same(State.load(file, made.weights), state)
    file.write_bytes(file.read_bytes()[:-7])
    again = sessions_in(made.weights, tmp_path)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="damaged"):
            again.open("tale")
    again.delete("tale")
    assert not file.exists()


def test_names_that_differ_in_case_are_two_files_and_foreign_files_are_left_alone(
    made, state, tmp_path
):
    kept = sessions_in(made.weights, tmp_path)
    put(kept, "tale", state)
    put(kept, "TALE", replace(state, tokens=np.array([9])))
    first, second = tmp_path.rglob("*.safetensors")
    assert first.name.lower() != second.name.lower()
    for name in ("notes.txt", f"b.{'0' * 12}.safetensors", "b..safetensors", "b.safetensors"):
        first.with_name(name).write_bytes(first.read_bytes())
    assert {s["id"] for s in sessions_in(made.weights, tmp_path).all()} == {"tale", "TALE"}
    assert len([x for x in tmp_path.rglob("*") if x.is_file()]) == 6
