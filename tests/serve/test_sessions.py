"""Sessions of one server, in memory and in a folder: limits, files, names, bad files and disks."""

import shutil
import time
from pathlib import Path

import pytest
import torch

from transformer_xl.apps.serve import session_store
from transformer_xl.apps.serve.errors import SessionError
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.session_store import is_name
from transformer_xl.apps.serve.sessions import Sessions
from transformer_xl.inference.generate import State, generate, load_state


@pytest.fixture
def state(made):
    writing = generate(made.model, [1, 2, 3], length=20, seed=1)
    list(writing)
    read = torch.arange(12)
    return State(writing.mems, writing.last_token, writing.random_state, read=read)


@pytest.fixture(params=["memory", "folder"])
def place(request, tmp_path):
    """Where sessions are stored."""
    return tmp_path if request.param == "folder" else None


def sessions_in(made_weights, folder=None, *, largest=0, clock=time.time, **limits):
    settings = ServeSettings(sessions=folder, **limits)
    return Sessions(settings, made_weights, largest=largest, clock=clock)


def put(kept, name, state):
    kept.close(kept.open(name), state)


def same(one, two):
    tensors = [x.mems.state_dict() for x in (one, two)]
    return (
        all(torch.equal(tensors[0][name], tensors[1][name]) for name in ("keys", "values"))
        and torch.equal(one.random, two.random)
        and torch.equal(one.read, two.read)
        and one.last_token == two.last_token
    )


def test_what_is_kept_with_a_state_counts_as_its_bytes(made, state):
    kept = sessions_in(made.weights)
    put(kept, "a", state)
    before = kept.nbytes
    put(kept, "a", state._replace(note="é" * 1000))
    assert kept.nbytes == before + 2000 == kept.find("a").nbytes
    kept.delete("a")
    assert kept.nbytes == 0


def test_what_was_used_least_leaves_the_memory_and_comes_back(made, state, tmp_path):
    kept = sessions_in(made.weights, tmp_path, sessions_in_memory=3)
    for number in range(10):
        put(kept, f"s{number}", state._replace(last_token=number))
        assert kept.n_in_memory <= 3
    # A request that leaves a session as it was counts as a use.
    put(kept, "s8", None)
    put(kept, "s0", None)
    assert [s.name for s in kept.all()][:2] == ["s0", "s8"]
    assert [s.name for s in kept.all() if s.state] == ["s0", "s8", "s9"]
    for number in range(10):
        session = kept.open(f"s{number}")
        assert same(session.state, state._replace(last_token=number))
        kept.close(session)
        assert same(kept.peek(f"s{9 - number}"), state._replace(last_token=9 - number))
        assert kept.n_in_memory <= 3
    assert len(kept) == 10


def test_bytes_in_memory_are_bounded(made, state, tmp_path):
    kept = sessions_in(made.weights, tmp_path, session_bytes=50_000)
    sizes = set()
    for number in range(30):
        put(kept, f"s{number}", state)
        sizes.add(kept.nbytes)
        assert kept.nbytes <= 50_000
    assert max(sizes) > 25_000
    again = sessions_in(made.weights, tmp_path)
    assert {s.name for s in again.all()} == {f"s{n}" for n in range(30)}
    assert same(again.open("s3").state, state)


def test_a_session_grows_until_its_memory_is_full(made, tmp_path):
    kept, sizes, files = sessions_in(made.weights, tmp_path), [], []
    for length in (3, made.model.config.mem_len, 40):
        writing = generate(made.model, [1], length=length, seed=1)
        list(writing)
        put(kept, "s", State(writing.mems, writing.last_token, writing.random_state))
        sizes.append(kept.nbytes)
        files.append(sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()))
    for young, full, old in (sizes, files):
        assert young < full
        assert full == pytest.approx(old, abs=64)


def test_a_session_has_one_user_at_a_time(made, state, place):
    kept = sessions_in(made.weights, place)
    put(kept, "a", state)
    session = kept.open("a")
    for use in (kept.open, kept.delete):
        with pytest.raises(SessionError, match="session 'a' is in use"):
            use("a")
    assert kept.find("a").is_busy
    # To look at it, nobody need wait.
    assert same(kept.peek("a"), state)
    kept.close(session)
    kept.delete("a")
    for use in (kept.peek, kept.find, kept.delete):
        with pytest.raises(SessionError, match="there is no session 'a'"):
            use("a")
    # One that never began is none, and one whose first answer is not complete is busy.
    session = kept.open("a")
    with pytest.raises(SessionError, match="session 'a' is in use"):
        kept.peek("a")
    assert kept.find("a").is_busy
    kept.close(session)
    assert len(kept) == 0
    assert place is None or not list(place.rglob("*.safetensors"))


def test_there_is_an_end_to_how_many_there_are(made, state, tmp_path):
    kept = sessions_in(made.weights, tmp_path, max_sessions=2)
    put(kept, "a", state)
    session = kept.open("b")
    with pytest.raises(SessionError, match="there are 2 sessions"):
        kept.open("c")
    kept.close(session, state)
    put(kept, "a", state)
    without_disk = sessions_in(made.weights, session_bytes=1)
    put(without_disk, "a", state)
    with pytest.raises(SessionError, match=r"the sessions have \d+ bytes"):
        without_disk.open("b")
    # Small yet, they will grow; and there is nowhere to go from the memory.
    growing = sessions_in(made.weights, session_bytes=2_000_000, largest=1_000_000)
    put(growing, "a", state)
    put(growing, "b", state)
    with pytest.raises(SessionError, match="have 2000000 bytes when they are full"):
        growing.open("c")
    put(growing, "a", state)


def test_what_nobody_uses_is_deleted(made, state, tmp_path, monkeypatch):
    now = [1000.0]
    kept = sessions_in(made.weights, tmp_path, session_idle=60, clock=lambda: now[0])
    for name in "abc":
        put(kept, name, state)
    now[0] += 50
    put(kept, "new", state)
    now[0] += 20
    busy, original = kept.open("c"), Path.unlink

    def unlink(self, **how):
        if self.name.startswith("a."):
            raise PermissionError(f"{self} is read-only")
        original(self, **how)

    # What cannot be deleted does not keep others from it.
    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(OSError, match=r"1 sessions were deleted, 1 not: .* is read-only"):
        kept.expire()
    monkeypatch.undo()
    assert {s.name for s in kept.all()} == {"a", "c", "new"}
    kept.close(busy, state)
    assert kept.expire() == 1
    assert [s.name for s in kept.all()] == ["c", "new"]
    assert kept.n_in_memory == 2
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2


def test_sessions_belong_to_the_weights_that_were_loaded(made, make_model, state, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(made.folder, folder)
    weights = folder / made.weights.name
    kept = sessions_in(weights, tmp_path / "sessions", sessions_in_memory=1)
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
    assert same(load_state(file, made.weights), state)
    file.write_bytes(file.read_bytes()[:-7])
    again = sessions_in(made.weights, tmp_path)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="damaged"):
            again.open("tale")
    again.delete("tale")
    assert not file.exists()


def test_names_are_no_paths(tmp_path):
    assert all(map(is_name, ["a", "A-1", "x.y_z", "0" * 64]))
    bad = ["", ".", "..", "../a", "a/b", "a\\b", "-a", ".a", "a\n", "a b", "ä", "a\0", "0" * 65]
    assert not any(map(is_name, bad))


def test_names_that_differ_in_case_are_two_sessions_on_any_file_system(made, state, tmp_path):
    kept = sessions_in(made.weights, tmp_path)
    put(kept, "tale", state)
    put(kept, "TALE", state._replace(last_token=9))
    names = [file.name.lower() for file in tmp_path.rglob("*.safetensors")]
    assert len({*names}) == 2


def test_foreign_files_are_left_alone(made, state, tmp_path):
    put(sessions_in(made.weights, tmp_path), "a", state)
    (file,) = tmp_path.rglob("*.safetensors")
    for name in ("notes.txt", f"b.{'0' * 12}.safetensors", "b..safetensors", "b.safetensors"):
        file.with_name(name).write_bytes(file.read_bytes())
    file.with_name(f"a.{file.name[2:5]}.safetensors").write_bytes(file.read_bytes())
    assert [s.name for s in sessions_in(made.weights, tmp_path).all()] == ["a"]
    assert len(list(file.parent.iterdir())) == 6


def failing(path, state, weights):
    raise OSError("the disk is full")


def test_an_answer_that_cannot_be_saved_leaves_the_session_as_it_was(
    made, state, tmp_path, monkeypatch
):
    kept = sessions_in(made.weights, tmp_path)
    put(kept, "old", state)
    monkeypatch.setattr(session_store, "write_state", failing)
    for name in ("old", "new"):
        with pytest.raises(OSError, match="full"):
            put(kept, name, state._replace(last_token=9))
        assert same(kept.peek("old"), state)
    with pytest.raises(OSError, match="full"):
        kept.create("new", state)
    assert [(s.name, s.is_busy) for s in kept.all()] == [("old", False)]
    monkeypatch.undo()
    put(kept, "old", state._replace(last_token=9))
    assert kept.peek("old").last_token == 9
    kept.create("new", state)


def test_a_session_is_created_with_a_state_or_not_at_all(made, state, place):
    kept = sessions_in(made.weights, place, max_sessions=2)
    put(kept, "old", state)
    kept.create("new", kept.peek("old"))
    for sessions in [kept, sessions_in(made.weights, place)] if place else [kept]:
        assert same(sessions.peek("new"), state)
    for name in ("new", "old"):
        with pytest.raises(SessionError, match="take another name, or delete it first"):
            kept.create(name, state)
        assert not kept.find(name).is_busy
    with pytest.raises(SessionError, match="as many as may be"):
        kept.create("third", state)
    kept.delete("new")
    session = kept.open("new")
    with pytest.raises(SessionError, match="in use"):
        kept.create("new", state)
    kept.close(session)


def test_who_looks_while_an_answer_is_saved_keeps_no_old_state(made, state, tmp_path, monkeypatch):
    kept = sessions_in(made.weights, tmp_path, sessions_in_memory=1)
    put(kept, "a", state)
    put(kept, "b", state)
    load = session_store.load_state

    def slow(*words, **how):
        old = load(*words, **how)
        monkeypatch.undo()
        put(kept, "a", state._replace(last_token=9))
        return old

    monkeypatch.setattr(session_store, "load_state", slow)
    assert same(kept.peek("a"), state)
    assert kept.open("a").state.last_token == 9
