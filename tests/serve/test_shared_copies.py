"""Sessions in Redis that do not begin with their first turn: copies, and texts after a preface."""

import pytest
import torch

from transformer_xl.apps.serve.errors import SessionError
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.session_store import Turn
from transformer_xl.apps.serve.sessions import Sessions
from transformer_xl.inference.generate import State, generate


@pytest.fixture
def both(made, redis):
    """Two servers that share their sessions."""
    settings = ServeSettings(sessions=redis.url)
    found = [Sessions(settings, made.weights, made.model, largest=10**5) for _ in range(2)]
    yield found
    for each in found:
        each.close_store()


def append(made, sessions, name, read, n):
    """Append a turn to a session as a server does; return the new state."""
    session = sessions.open(name)
    before = session.state
    last = [] if before is None else [before.last_token]
    known = [] if before is None else before.read.tolist()
    mems, seed = (None, 1) if before is None else (before.mems, before.random)
    writing = generate(made.model, [*last, *read], length=n, seed=seed, mems=mems)
    drawn = [*writing]
    known = torch.tensor([*known, *last, *read, *drawn[:-1]], dtype=torch.int32)
    state = State(writing.mems, drawn[-1], writing.random_state, read=known)
    sessions.close(session, state, Turn(read, drawn))
    return state


def same(one, two):
    pairs = zip(one.mems.tensors, two.mems.tensors, strict=True)
    close = all(torch.allclose(x, y, atol=1e-5) for x, y in pairs)
    return close and one.last_token == two.last_token and torch.equal(one.random, two.random)


def test_a_copy_goes_on_by_itself_on_another_server(made, both):
    one, two = both
    state = append(made, one, "old", [1, 2], 9)
    one.create("new", two.peek("old"))
    assert same(two.peek("new"), state)
    for each in both:
        with pytest.raises(SessionError, match="there is a session"):
            each.create("new", state)
        assert not each.find("new").is_busy
    longer = append(made, two, "new", [3], 4)
    assert same(one.peek("new"), longer)
    assert same(one.peek("old"), state)
    one.delete("old")
    assert [each.name for each in one.all()] == ["new"]


def test_what_was_read_before_the_first_turn_is_stored(made, both, monkeypatch):
    one, two = both
    monkeypatch.setattr(made.model, "preface", (1, 2, 3))
    state = append(made, one, "tale", [4], 3)
    assert same(two.peek("tale"), state)
    # Later turns are appended, and a server without a preface reads the same.
    monkeypatch.setattr(made.model, "preface", ())
    state = append(made, two, "tale", [5], 3)
    assert same(one.peek("tale"), state)
