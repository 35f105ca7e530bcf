"""Sessions in Redis: what is stored, leases and fencing numbers, damage; against a real server."""

import os
import random
import shutil
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch

pytest.importorskip("redis", reason="needs pip install 'transformer-xl[redis]'")

from transformer_xl.apps.serve import redis_store
from transformer_xl.apps.serve.errors import SessionError
from transformer_xl.apps.serve.redis_store import (
    RedisStore,
    pack_record,
    unpack_records,
)
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.session_store import Turn
from transformer_xl.apps.serve.sessions import Sessions
from transformer_xl.errors import CheckpointError
from transformer_xl.inference.generate import (
    State,
    generate,
    largest_state,
    random_numbers,
)
from transformer_xl.model.pretrained import weights_checksum

pytestmark = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="needs Redis: apt install redis-server"
)


@pytest.fixture
def stores(made, redis):
    """Makes stores of one server: `stores(session_lease=0.2)`."""
    begun = []

    def begin(model=made, **settings):
        given = ServeSettings(sessions=redis.url, **settings)
        largest = largest_state(model.model, model.model.config.mem_len)
        begun.append(RedisStore(given, weights_checksum(model.weights), model.model, largest))
        return begun[-1]

    yield begin
    for each in begun:
        each.close()


def write(made, store, name, read, n, seed, state=None, version=0):
    """Append a turn as a server does; return the tokens, the state and its version."""
    lease = store.acquire(name)
    if lease.version:
        version, state = store.load(name, (version, state) if version else None)
        assert version == lease.version
    last = () if state is None else (state.last_token,)
    before = torch.tensor([], dtype=torch.int32) if state is None else state.read
    prompt = [*last, *read]
    writing = generate(
        made.model,
        prompt,
        length=n,
        seed=state.random if seed is None else seed,
        mems=None if state is None else state.mems,
    )
    drawn = list(writing)
    known = torch.tensor([*before, *prompt, *drawn[:-1]], dtype=torch.int32)
    state = State(writing.mems, drawn[-1], writing.random_state, read=known)
    return drawn, state, store.save(lease, state, Turn(read, drawn))


def same(one, two):
    pairs = zip(one.mems.tensors, two.mems.tensors, strict=True)
    close = all(torch.allclose(x, y, atol=1e-5) for x, y in pairs)
    return close and (one.last_token, one.note) == (two.last_token, two.note)


def test_records_come_back():
    turns = [Turn([1, 2, 2**31 - 1], [4]), Turn([], []), Turn([], [5, 6])]
    content = b"".join(pack_record(n + 1, turn) for n, turn in enumerate(turns))
    assert [each.turn for each in unpack_records(content)] == turns
    for size in (1, 19, 21, len(content) - 1):
        with pytest.raises(CheckpointError, match="cut off"):
            unpack_records(content[:size])
    for place in (0, 9, 13, 17, 21):
        changed = bytearray(content)
        changed[place] ^= 1
        with pytest.raises(CheckpointError, match=r"checksum|cut off"):
            unpack_records(bytes(changed))


@pytest.mark.parametrize("session_snapshot", [1, 30, 1000])
def test_another_server_goes_on_with_the_same_tokens(made, stores, session_snapshot):
    one = stores(session_snapshot=session_snapshot)
    two = stores(session_snapshot=session_snapshot)
    kept = two_known = None
    version = known_version = 0
    mems, last, expected, found = None, [], [], []
    for n in range(8):
        read = [n % 7 + 1] * (n % 3) or [2]
        seed = n if n % 2 == 0 else None
        store = one if n % 4 < 2 else two
        # Each server goes on from what it knows itself.
        if store is one:
            drawn, kept, version = write(made, one, "tale", read, 9, seed or 0, kept, version)
        else:
            drawn, two_known, known_version = write(
                made, two, "tale", read, 9, seed or 0, two_known, known_version
            )
        found += drawn
        writing = generate(made.model, [*last, *read], length=9, seed=seed or 0, mems=mems)
        expected += list(writing)
        mems, last = writing.mems, [writing.last_token]
    assert found == expected
    loaded = stores().load("tale")[1]
    assert all(
        torch.allclose(x, y, atol=1e-5)
        for x, y in zip(loaded.mems.tensors, mems.tensors, strict=True)
    )
    assert torch.equal(loaded.random, writing.random_state)


@pytest.mark.parametrize(
    "settings",
    [
        {"reset_at": 5},
        {"kind": "lstm", "n_head": 8, "d_inner": 2048, "mem_len": 512},
        {"attn_type": 2},
        {"enhanced_recurrence": True},
        {"mem_len": 0},
        {"norm_first": True, "clamp_len": 5},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_models_of_every_kind_are_read_again(make_model, stores, settings):
    other = make_model(**settings)
    store = stores(other)
    state, version = None, 0
    for n in range(3):
        _, state, version = write(other, store, "s", [1, 5, 2], 14, n, state, version)
    assert same(store.load("s")[1], state)


def test_one_server_at_a_time(made, stores):
    one, two = stores(), stores()
    _, state, _ = write(made, one, "a", [1], 3, 1)
    lease = one.acquire("a")
    for use in (lambda: two.acquire("a"), lambda: two.delete("a")):
        with pytest.raises(SessionError, match="in use by another request"):
            use()
    assert [(each.name, each.is_busy) for each in two.all()] == [("a", True)]
    assert same(two.load("a")[1], state)
    one.release(lease)
    assert two.acquire("a").number > lease.number
    two.close()


@pytest.mark.slow
def test_a_lease_is_renewed_while_its_server_lives_and_ends_with_it(made, stores):
    one, two = stores(session_lease=0.3), stores(session_lease=0.3)
    write(made, one, "a", [1], 3, 1)
    one.acquire("a")
    time.sleep(0.7)
    with pytest.raises(SessionError, match="in use by another"):
        two.acquire("a")
    one._is_closing.set()
    time.sleep(0.4)
    two.acquire("a")


@pytest.mark.slow
def test_who_was_away_for_longer_than_the_lease_appends_nothing(made, stores):
    one, two = stores(session_lease=0.2), stores(session_lease=0.2)
    _, state, version = write(made, one, "a", [1], 3, 1)
    lease = one.acquire("a")
    one._held.clear()
    time.sleep(0.4)
    _, newer, later = write(made, two, "a", [2], 4, 2)
    assert later > lease.number
    with pytest.raises(SessionError, match="nothing of this request was appended"):
        one.save(lease, state, Turn([9], [9]))
    assert same(two.load("a")[1], newer)
    # Nor after it was deleted, or begun anew.
    two.delete("a")
    with pytest.raises(SessionError, match="taken over"):
        one.save(lease, state, Turn([9], [9]))
    _, newer, _ = write(made, two, "a", [3], 2, 2)
    with pytest.raises(SessionError, match="taken over"):
        one.save(lease, state, Turn([9], [9]))
    # What it knows of the old one is not taken for the new one.
    assert same(one.load("a", (version, state))[1], newer)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_lease_whose_answer_was_lost_is_given_again(made, stores, is_new):
    store = stores()
    if not is_new:
        write(made, store, "a", [1], 3, 1)
    script, answers = store._scripts["acquire"], []

    def loses(keys, given):
        store._scripts["acquire"] = script
        answers.append(script(keys, given))
        raise store._errors.ConnectionError("lost")

    store._scripts["acquire"] = loses
    lease = store.acquire("a")
    assert [*map(int, answers[0][1:])] == [lease.number, lease.version, lease.n_appended]
    with pytest.raises(SessionError, match="in use by another"):
        store.acquire("a")


def test_a_store_that_refuses_says_why_and_that_nothing_was_appended(made, stores, redis):
    store = stores()
    _, state, _ = write(made, store, "a", [1], 3, 1)
    lease = store.acquire("a")
    settings = [("maxmemory", "1", "0"), ("min-replicas-to-write", "1", "0")]
    for (name, bad, good), why in zip(
        settings, ("memory is full", "too few replicas"), strict=True
    ):
        redis.client.config_set(name, bad)
        with pytest.raises(SessionError, match=f"{why}: nothing of this request was"):
            store.save(lease, state, Turn([], [2]))
        redis.client.config_set(name, good)
    redis.client.replicaof("127.0.0.1", "1")
    with pytest.raises(SessionError, match="it is a replica: nothing"):
        store.save(lease, state, Turn([], [2]))
    redis.client.replicaof("NO", "ONE")
    assert len(_tail(store)) == 1
    # What makes room is not refused.
    store.release(lease)
    redis.client.config_set("maxmemory", "1")
    store.delete("a")
    redis.client.config_set("maxmemory", "0")


@pytest.mark.parametrize("session_snapshot", [1, 1000])
@pytest.mark.parametrize("then", ["acquired", "appended"])
def test_a_save_whose_answer_was_lost_is_known_after_another_server(
    made, stores, session_snapshot, then
):
    one, two = stores(session_snapshot=session_snapshot), stores()
    _, state, _ = write(made, one, "a", [1], 3, 1)
    lease = one.acquire("a")
    later = state._replace(last_token=2)
    one.save(lease, later, Turn([], [2]))
    if then == "acquired":
        two.acquire("a")
    else:
        write(made, two, "a", [3], 2, 1)
    assert one.save(lease, later, Turn([], [2])) == lease.number
    assert len(_tail(two)) == (session_snapshot > 1) * 2 + (then == "appended")


def test_of_a_save_that_a_later_memory_may_contain_it_is_not_told_that_it_was_not_appended(
    made, stores, monkeypatch
):
    one, two = stores(), stores(session_snapshot=1)
    _, state, _ = write(made, one, "a", [1], 3, 1)
    lease = one.acquire("a")
    script = one._scripts["save"]

    def loses(keys, given):
        # What it did is lost on the way; meanwhile another server goes on.
        script(keys, given)
        write(made, two, "a", [3], 2, 1)
        one._scripts["save"] = script
        raise one._errors.ConnectionError("lost")

    one._scripts["save"] = loses
    with pytest.raises(SessionError, match="is not known"):
        one.save(lease, state, Turn([], [2]))


def test_a_turn_that_the_store_has_lost_is_not_gone_on_from(made, stores, redis):
    one, two = stores(), stores()
    _, state, version = write(made, one, "a", [1], 3, 1)
    before = redis.client.dump("txl:session:a")
    _, lost, lost_version = write(made, one, "a", [2], 3, 1, state, version)
    # As after a crash without appendfsync always, or of a replica that took over.
    redis.client.restore("txl:session:a", 0, before, replace=True)
    _, expected, _ = write(made, two, "a", [3], 4, 1)
    assert same(one.load("a", (lost_version, lost))[1], expected)
    # Whoever knows what is there reads only what is new.
    assert same(one.load("a", (version, state))[1], expected)


def test_a_lease_that_was_given_back_is_not_renewed(made, stores):
    store = stores()
    _, state, _ = write(made, store, "a", [1], 3, 1)
    lease = store.acquire("a")
    store.save(lease, state, Turn([], [2]))
    # The thread that renews may have seen it just before.
    given = [lease.number, store._lease_us, store._idle_ms]
    assert store._scripts["renew"](store._keys("a"), given) == 0
    store.release(store.acquire("a"))


def test_numbers_grow_even_if_the_store_lost_all(made, stores, redis):
    store = stores()
    _, _, version = write(made, store, "a", [1], 3, 1)
    redis.client.flushall()
    _, _, later = write(made, store, "a", [2], 3, 1)
    assert later > version


def test_unused_sessions_expire_and_their_number_is_limited(made, stores):
    store = stores(max_sessions=2)
    for name in "ab":
        write(made, store, name, [1], 2, 1)
    with pytest.raises(SessionError, match="there are 2 sessions"):
        store.acquire("c")
    store.close()
    store = stores(max_sessions=2, session_idle=0.2, session_lease=0.1)
    write(made, store, "a", [1], 2, 1)
    time.sleep(0.3)
    assert store.all() == []
    # Another server has the session b for a week; with this one's limit it is gone from the list.
    store._client.delete("txl:session:b")
    for use in (store.load, store.find, store.delete):
        with pytest.raises(SessionError, match="there is no session"):
            use("a")
    store.acquire("c")


def test_what_is_damaged_is_told_and_can_be_deleted(made, make_model, stores, redis):
    store = stores(session_snapshot=5)
    key = "txl:session:a"
    damages = [
        ("tail", b"\x80\x04\x95pickle"),
        ("tail", pack_record(10**15, Turn([], [10**6]))),
        ("tail", pack_record(10**15, Turn([-1], []))),
        ("memory", b""),
        ("memory", b"\x00" * 100),
        ("memory", b"x" * (1 << 21)),
        ("version", b"no"),
        ("version", b"9" * 400),
        ("snap", b"-1"),
        ("random", b"\x01"),
        ("note", b"\xff\xfe"),
        ("until", b"soon"),
        ("appended", b"x"),
        ("fence", b"x" * 999),
    ]
    for field, value in damages:
        write(made, store, "a", [1], 9, 1)
        redis.client.hset(key, field, value)
        for use in (lambda: store.release(store.acquire("a")), lambda: store.load("a")):
            # Whatever is not needed may be damaged; what is is told.
            with suppress(RuntimeError):
                use()
        redis.client.hset(key, "until", 0)
        store.delete("a")
        assert not redis.client.exists(key)
    redis.client.set(key, "a text")
    with pytest.raises(RuntimeError, match="damaged"):
        store.acquire("a")
    store.delete("a")
    write(made, store, "a", [1], 9, 1)
    with pytest.raises(ValueError, match="made by another model"):
        stores(make_model(init_std=0.3)).load("a")


def test_damaged_sessions_are_not_listed_and_hide_no_others(made, stores, redis, caplog):
    store = stores()
    for name in "abc":
        write(made, store, name, [1], 3, 1)
    redis.client.hset("txl:session:a", "until", "soon")
    redis.client.delete("txl:session:b")
    redis.client.lpush("txl:session:b", "x")
    assert [each.name for each in store.all()] == ["c"]
    for name in "ab":
        assert f"ignored in the list of sessions: {name}" in caplog.text


def test_whatever_is_changed_in_the_store_is_read_or_refused(
    made, stores, redis, monkeypatch, is_nightly
):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "fuzzing"))
    from mutations import ANYWHERE

    monkeypatch.setattr(redis_store.log, "error", lambda *words: None)
    store, key, draw = stores(session_snapshot=20), "txl:session:a", random.Random(1)
    for n in range(4):
        write(made, store, "a", [1, 2], 9, n)
    whole, outcomes = redis.client.hgetall(key), Counter()
    names = sorted(name for name, value in whole.items() if value)
    for _ in range(int(os.environ.get("TXL_EXAMPLES", "10000" if is_nightly else "60"))):
        fields = dict(whole)
        for name in draw.sample(names, draw.choice((1, 1, 1, 2))):
            fields[name] = draw.choice(ANYWHERE)(draw, fields[name] * draw.choice((1, 1, 40)))
        redis.client.delete(key)
        redis.client.hset(key, mapping=fields)
        outcome = _outcome(store)
        # The very kinds: others that are derived from them would be faults.
        assert outcome in ("read", "CheckpointError", "InputError", "SessionError"), fields
        outcomes[outcome] += 1
    assert outcomes["CheckpointError"] > 0
    if path := os.environ.get("TXL_OUTCOMES"):
        Path(path).write_text(f"{dict(outcomes)}\n")


def _outcome(store):
    """Use a session as a server does; return how that ended."""
    try:
        lease = store.acquire("a")
        _, state = store.load("a")
    except Exception as error:  # noqa: BLE001  (its kind is what is asked)
        return type(error).__name__
    finally:
        store._held.clear()
    # What could be read can be continued.
    store.save(lease, state, Turn([1], [2]))
    return "read"


def test_sessions_of_two_servers_follow_each_other(made, redis):
    def begin():
        settings = ServeSettings(sessions=redis.url, sessions_in_memory=2)
        return Sessions(settings, made.weights, made.model, largest=10**5)

    one, two = begin(), begin()

    def put(sessions, name, token):
        session = sessions.open(name)
        state = session.state
        mems = made.model.keep(made.model.start_memory(1)) if state is None else state.mems
        random = random_numbers(token).get_state()
        sessions.close(session, State(mems, token, random, read=None), Turn([], [token]))

    for name in "abc":
        put(one, name, 1)
    assert one.n_in_memory == 2
    assert [each.name for each in two.all()] == ["c", "b", "a"]
    put(two, "c", 2)
    assert one.peek("c").last_token == 2
    assert one.open("c").state.last_token == 2
    with pytest.raises(SessionError, match="in use by another"):
        two.open("c")
    with pytest.raises(SessionError, match="in use by another"):
        two.delete("c")
    assert two.find("c").is_busy
    two.delete("b")
    for each in (one, two):
        with pytest.raises(SessionError, match="there is no session"):
            each.find("b")
        with pytest.raises(SessionError, match="there is no session"):
            each.peek("b")
    # One that has this very name begins anew, also where the old one is in memory.
    session = one.open("b")
    assert session.state is None
    one.close(session)
    for each in (one, two):
        each.close_store()


@pytest.mark.slow
def test_a_store_that_is_gone_is_told_soon_and_comes_back(made, stores, redis, monkeypatch):
    monkeypatch.setattr(redis_store, "_SECONDS", 0.4)
    monkeypatch.setattr(redis_store, "_REST", 0.2)
    # Nor does a large memory make it longer.
    monkeypatch.setattr(redis_store, "_SPEED", 1)
    store = stores(session_snapshot=1)
    _, state, _ = write(made, store, "a", [1], 5, 1)
    lease = store.acquire("a")
    redis.kill()
    started = time.monotonic()
    for use in (
        lambda: store.save(lease, state, Turn([], [2])),
        lambda: store.acquire("a"),
        lambda: store.load("a"),
        store.all,
    ):
        with pytest.raises(SessionError, match="Idempotency-Key"):
            use()
    assert time.monotonic() - started < 5
    redis.start()
    time.sleep(0.3)
    # Nothing is lost that was saved.
    assert same(store.load("a")[1], state)


def test_an_operation_waits_for_a_store_that_starts_again(made, stores, redis):
    store = stores()
    _, state, _ = write(made, store, "a", [1], 5, 1)
    lease = store.acquire("a")
    redis.kill()
    starting = threading.Timer(0.2, redis.start)
    starting.start()
    assert store.save(lease, state, Turn([1], [2])) == lease.number
    starting.join(30)
    assert [len(x.turn.drawn) for x in _tail(store)] == [5, 1]


def _tail(store):
    return unpack_records(store._client.hget("txl:session:a", "tail"))


def test_what_cannot_be_is_refused(made, redis, caplog):
    with pytest.raises(ValueError, match="session_snapshot=5 has no effect"):
        ServeSettings(session_snapshot=5).check_store()
    weights = weights_checksum(made.weights)
    with pytest.raises(ValueError, match="Redis takes 536,870,912 in one value"):
        RedisStore(ServeSettings(sessions=redis.url), weights, made.model, 10**9)
    bad = ServeSettings(sessions="redis://user:secret@127.0.0.1:1/0")
    with pytest.raises(OSError, match=r"sessions=redis://127.0.0.1:1/0: .* reached") as caught:
        RedisStore(bad, weights, made.model, 10**5)
    assert "secret" not in str(caught.value)
    redis.client.config_set("appendfsync", "everysec")
    RedisStore(ServeSettings(sessions=redis.url), weights, made.model, 10**5).close()
    redis.client.config_set("appendfsync", "always")
    assert "appendfsync=everysec" in caplog.text
    assert "maxmemory-policy" not in caplog.text
    redis.client.config_set("maxmemory", "1gb")
    redis.client.config_set("maxmemory-policy", "volatile-lru")
    RedisStore(ServeSettings(sessions=redis.url), weights, made.model, 10**5).close()
    redis.client.config_set("maxmemory-policy", "noeviction")
    redis.client.config_set("maxmemory", "0")
    assert "maxmemory-policy=volatile-lru" in caplog.text
