"""Sessions as such: bounds, files, names, and what happens when a file is bad."""

import contextlib
import shutil
import time
from pathlib import Path

import pytest
import torch

from transformer_xl.apps.serve import session_store
from transformer_xl.apps.serve.errors import SessionError
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.session_store import is_name
from transformer_xl.apps.serve.sessions import Sessions, create
from transformer_xl.inference.generate import State, generate, load_state


@pytest.fixture
def state(made):
    writing = generate(made.model, [1, 2, 3], length=20, seed=1)
    list(writing)
    read = torch.arange(12)
    return State(writing.mems, writing.last_token, writing.random_state, read=read)


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


def test_a_request_that_leaves_a_session_as_it_was_counts_as_a_use(made, state, tmp_path):
    kept = sessions_in(made.weights, tmp_path, sessions_in_memory=2)
    put(kept, "a", state)
    put(kept, "b", state)
    put(kept, "a", None)
    put(kept, "c", state)
    assert [s.name for s in kept.all() if s.state] == ["c", "a"]


@pytest.mark.parametrize("save", ["answer", "later"])
def test_bytes_in_memory_are_bounded(made, state, tmp_path, save):
    kept = sessions_in(made.weights, tmp_path, session_bytes=50_000, save=save)
    sizes = set()
    for number in range(30):
        put(kept, f"s{number}", state)
        sizes.add(kept.nbytes)
        assert kept.nbytes <= 50_000
    assert max(sizes) > 25_000
    assert kept.stop() == 0
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


def test_a_session_has_one_user_at_a_time(made, state, tmp_path):
    kept = sessions_in(made.weights, tmp_path)
    put(kept, "a", state)
    session = kept.open("a")
    for use in (kept.open, kept.save, kept.delete):
        with pytest.raises(SessionError, match="session 'a' is in use"):
            use("a")
    # To look at it, nobody need wait.
    assert same(kept.peek("a"), state)
    kept.close(session)
    kept.delete("a")
    for use in (kept.peek, kept.save, kept.delete):
        with pytest.raises(SessionError, match="there is no session 'a'"):
            use("a")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_session_that_never_began_is_none(made, tmp_path):
    kept = sessions_in(made.weights, tmp_path)
    kept.close(kept.open("a"))
    assert len(kept) == 0


def test_there_is_an_end_to_how_many_there_are(made, state, tmp_path):
    kept = sessions_in(made.weights, tmp_path, max_sessions=2)
    put(kept, "a", state)
    put(kept, "b", state)
    with pytest.raises(SessionError, match="there are 2 sessions"):
        kept.open("c")
    put(kept, "a", state)
    without_disk = sessions_in(made.weights, session_bytes=1)
    put(without_disk, "a", state)
    with pytest.raises(SessionError, match=r"the sessions have \d+ bytes"):
        without_disk.open("b")
    with pytest.raises(SessionError, match="--sessions DIR"):
        without_disk.save("a")
    # Small yet, they will grow; and there is nowhere to go from the memory.
    growing = sessions_in(made.weights, session_bytes=2_000_000, largest=1_000_000)
    put(growing, "a", state)
    put(growing, "b", state)
    with pytest.raises(SessionError, match="have 2000000 bytes when they are full"):
        growing.open("c")
    put(growing, "a", state)


def test_what_nobody_uses_is_deleted(made, state, tmp_path):
    now = [1000.0]
    kept = sessions_in(made.weights, tmp_path, session_idle=60, clock=lambda: now[0])
    put(kept, "old", state)
    now[0] += 50
    put(kept, "new", state)
    now[0] += 20
    assert kept.expire() == 1
    assert [s.name for s in kept.all()] == ["new"]
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1


def test_what_is_used_again_while_others_are_deleted_stays(made, state, tmp_path, monkeypatch):
    now = [1000.0]
    kept = sessions_in(made.weights, tmp_path, session_idle=60, clock=lambda: now[0])
    for name in "abc":
        put(kept, name, state)
    now[0] += 100
    original = Sessions._set_state

    def meanwhile(self, session, given):
        original(self, session, given)
        # The first that goes gives others the time to use one and delete one.
        if given is None and session.name == "c":
            put(self, "b", state)
            self.delete("a")

    monkeypatch.setattr(Sessions, "_set_state", meanwhile)
    assert kept.expire() == 1
    assert [s.name for s in kept.all()] == ["b"]
    assert same(kept.peek("b"), state)


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


def test_files_are_those_of_txl_generate(made, state, tmp_path):
    kept = sessions_in(made.weights, tmp_path)
    put(kept, "tale", state)
    (file,) = tmp_path.rglob("*.safetensors")
    assert same(load_state(file, made.weights), state)


def test_a_damaged_file_and_one_of_another_model_are_told_apart(made, make_model, state, tmp_path):
    kept = sessions_in(made.weights, tmp_path)
    put(kept, "a", state)
    other = sessions_in(make_model(init_std=0.3).weights, tmp_path)
    with pytest.raises(ValueError, match="made by another model"):
        other.open("a")
    (file,) = tmp_path.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-7])
    again = sessions_in(made.weights, tmp_path)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="damaged"):
            again.open("a")
    again.delete("a")
    assert not file.exists()


def test_a_disk_that_fails_loses_nothing_that_is_in_memory(made, state, tmp_path, monkeypatch):
    def fails(path, state, weights):
        raise OSError("the disk is full")

    kept = sessions_in(made.weights, tmp_path, sessions_in_memory=1, save="later")
    monkeypatch.setattr(session_store, "write_state", fails)
    put(kept, "a", state)
    put(kept, "b", state)
    assert kept.n_in_memory == 2
    assert kept.stop() == 2
    monkeypatch.undo()
    put(kept, "c", state)
    assert kept.n_in_memory == 1
    assert same(kept.open("a").state, state)


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
    kept = sessions_in(made.weights, tmp_path)
    put(kept, "a", state)
    (file,) = tmp_path.rglob("*.safetensors")
    (file.parent / "notes.txt").write_text("mine")
    (file.parent / f"b.{'0' * 12}.safetensors").write_bytes(b"x")
    assert [s.name for s in sessions_in(made.weights, tmp_path).all()] == ["a"]


def test_a_file_whose_name_has_no_digest_is_foreign(made, state, tmp_path):
    kept = sessions_in(made.weights, tmp_path)
    put(kept, "a", state)
    (file,) = tmp_path.rglob("*.safetensors")
    for name in ("b..safetensors", "b.safetensors", f"a.{file.name[2:5]}.safetensors"):
        file.with_name(name).write_bytes(file.read_bytes())
    assert [s.name for s in sessions_in(made.weights, tmp_path).all()] == ["a"]


@pytest.mark.parametrize("save", ["answer", "later"])
def test_a_full_disk_does_not_let_sessions_fill_the_memory(
    made, state, tmp_path, monkeypatch, save
):
    def fails(path, state, weights):
        raise OSError("the disk is full")

    kept = sessions_in(made.weights, tmp_path, sessions_in_memory=3, save=save)
    put(kept, "saved", state)
    kept.save("saved")
    monkeypatch.setattr(session_store, "write_state", fails)
    for number in range(4):
        session = kept.open(f"s{number}")
        with pytest.raises(OSError, match="full") if save == "answer" else contextlib.nullcontext():
            kept.close(session, state)
    for number in range(4, 20):
        with pytest.raises(SessionError, match="free space on the disk"):
            kept.open(f"s{number}")
        assert kept.n_in_memory == 4
    # Those that are there go on, and what is on the disk is still read, though not kept.
    kept.close(kept.open("s0"))
    assert same(kept.peek("saved"), state)
    assert kept.n_in_memory <= 4
    monkeypatch.undo()
    put(kept, "late", state)
    assert kept.n_in_memory <= 3
    assert same(kept.peek("s1"), state)


def test_sessions_that_come_at_once_do_not_fill_the_memory_either(
    made, state, tmp_path, monkeypatch
):
    def fails(path, state, weights):
        raise OSError("the disk is full")

    monkeypatch.setattr(session_store, "write_state", fails)
    kept = sessions_in(made.weights, tmp_path, sessions_in_memory=3, save="later")
    put(kept, "first", state)
    begun = [kept.open(f"s{n}") for n in range(3)]
    with pytest.raises(SessionError, match="free space on the disk"):
        kept.open("one more")
    for session in begun:
        kept.close(session, state)
    assert kept.n_in_memory == 4


def test_what_cannot_be_deleted_does_not_keep_others_from_it(made, state, tmp_path, monkeypatch):
    now = [1000.0]
    kept = sessions_in(made.weights, tmp_path, session_idle=60, clock=lambda: now[0])
    for name in "abc":
        put(kept, name, state)
    now[0] += 100
    original = Path.unlink

    def unlink(self, **how):
        if self.name.startswith("a."):
            raise PermissionError(f"{self} is read-only")
        original(self, **how)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(OSError, match=r"2 sessions were deleted, 1 not: .* is read-only"):
        kept.expire()
    assert [s.name for s in kept.all()] == ["a"]
    monkeypatch.undo()
    assert kept.expire() == 1


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_session_is_created_with_a_state_or_not_at_all(
    made, state, tmp_path, monkeypatch, is_stored
):
    kept = sessions_in(made.weights, tmp_path if is_stored else None, max_sessions=2)
    put(kept, "old", state)
    create(kept, "new", kept.peek("old"))
    for sessions in [kept, sessions_in(made.weights, tmp_path)] if is_stored else [kept]:
        assert same(sessions.peek("new"), state)
    for name in ("new", "old"):
        with pytest.raises(SessionError, match="take another name, or delete it first"):
            create(kept, name, state)
        assert not kept.find(name).is_busy
    with pytest.raises(SessionError, match="as many as may be"):
        create(kept, "third", state)
    kept.delete("new")
    session = kept.open("new")
    with pytest.raises(SessionError, match="in use"):
        create(kept, "new", state)
    kept.close(session)
    if is_stored:
        monkeypatch.setattr(session_store, "write_state", lambda *given: failing())
        with pytest.raises(OSError, match="full"):
            create(kept, "new", state)
        monkeypatch.undo()
        create(kept, "new", state)


def failing():
    raise OSError("the disk is full")
