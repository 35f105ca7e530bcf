"""A request that is sent twice appends once: keys, turns, and clients that have left."""

import json
import socket

import pytest

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")
httpx = pytest.importorskip("httpx")

from transformer_xl.apps.serve import errors, repeats, schemas  # noqa: E402  (they need these)
from transformer_xl.apps.serve.serve_settings import ServeSettings  # noqa: E402
from transformer_xl.apps.serve.service import Service  # noqa: E402

ASKED = {"prompt": "abc", "session": "tale", "max_tokens": 7}


def post(server, key=None, **body):
    headers = {} if key is None else {"Idempotency-Key": key}
    url = server.address + "/v1/completions"
    return httpx.post(url, json=ASKED | body, headers=headers, timeout=60)


def events(answer):
    *found, done = answer.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in found]


def turns(server, name="tale"):
    return httpx.get(f"{server.address}/v1/sessions/{name}").json()["turns"]


def test_the_same_key_gets_the_same_answer_and_appends_nothing(made, run_server, tmp_path):
    with run_server(made, sessions=tmp_path) as server:
        first = post(server, "one", seed=3).json()
        assert post(server, "one", seed=3).json() == first | {"repeated": True}
        body = {"prompt": "d", "max_tokens": 5}
        streamed = events(post(server, "two", stream=True, **body))
    # After a restart, too, and in a stream.
    with run_server(made, sessions=tmp_path) as server:
        again = post(server, "two", **body).json()
        (told,) = events(post(server, "two", stream=True, **body))
        assert told == again
        (choice,) = again["choices"]
        assert "".join(x["choices"][0]["text"] for x in streamed) == choice["text"]
        assert [y for x in streamed for y in x["choices"][0]["token_ids"]] == choice["token_ids"]
        assert turns(server) == 2
        third = post(server, prompt="", max_tokens=4).json()["choices"][0]["text"]
    written = [made.alone("abc", 7, seed=3)]
    assert first["choices"][0]["text"] == written[0]
    with run_server(made) as server:
        for key, body in (("one", {"seed": 3}), ("two", {"prompt": "d", "max_tokens": 5})):
            post(server, key, **body)
        assert post(server, prompt="", max_tokens=4).json()["choices"][0]["text"] == third


def test_a_key_belongs_to_one_request_of_a_session(made, run_server):
    with run_server(made) as server:
        assert post(server, "one").status_code == 200
        for body in ({"prompt": "d"}, {"max_tokens": 6}, {"seed": 1}):
            refused = post(server, "one", **body)
            assert refused.json()["error"]["code"] == "idempotency_key_reused"
            assert refused.status_code == 409
        # In another session it is another one.
        assert post(server, "one", session="other", seed=1).status_code == 200
        assert turns(server) == 1
        assert post(server, "two", session=None).status_code == 400
        assert post(server, "a key").status_code == 400
        assert post(server, "x" * 256).status_code == 400
        assert post(server, session=None, session_turn=0).status_code == 400
        refused = post(server, "two", logprobs=0)
        assert refused.status_code == 400
        assert "logprobs are not stored with an Idempotency-Key" in refused.text


def test_a_request_for_another_turn_is_refused(made, run_server):
    with run_server(made) as server:
        assert post(server, "0", session_turn=0).json()["session_turn"] == 1
        for n in range(1, 3):
            answer = post(server, f"{n}", prompt="", max_tokens=1, session_turn=n).json()
            assert answer["session_turn"] == n + 1
        for key, turn in (("0", 0), (None, 2), (None, 4)):
            # The answer of the first key is forgotten.
            refused = post(server, key, session_turn=turn)
            assert refused.status_code == 409
            assert refused.json()["error"]["code"] == "session_at_another_turn"
        assert turns(server) == 3


@pytest.mark.slow
def test_who_has_a_key_and_leaves_finds_the_answer(made, run_server, until):
    with run_server(made, max_tokens=10**6) as server:
        port = int(server.address.rpartition(":")[2])
        body = b'{"prompt": "abc", "session": "tale", "max_tokens": 400, "seed": 5}'
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nIdempotency-Key: one\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head.encode() + body)
            until(lambda: server.service.engine.n_running)
        until(lambda: not server.service.sessions.describe("tale")["is_busy"])
        answer = post(server, "one", max_tokens=400, seed=5).json()
        assert answer["repeated"] is True
        assert answer["choices"][0]["text"] == made.alone("abc", 400, seed=5)


def test_a_note_of_the_version_before_has_its_turns_and_damage_is_told():
    body = schemas.CompletionRequest(prompt="a", session="tale")
    assert repeats.note_of("") == repeats.Note()
    old = repeats.note_of('{"turns": 3, "told": [{"key": "one", "turn": 3}]}')
    for note in (old, old.after(body, "two", "{}"), old.after(body, None, "{}")):
        with pytest.raises(errors.ApiError, match=r"is not stored.*: nothing is appended"):
            repeats.note_of(note.encoded()).answered(body, "one")
    assert note.turns == 4
    for damaged in ("{", "[]", '{"turns": -1}', '{"turns": 1, "more": 2}', '{"told": [1]}'):
        with pytest.raises(errors.SessionError, match="damaged"):
            repeats.note_of(damaged)


def test_the_answers_of_keys_have_room_in_session_bytes(made):
    body = schemas.CompletionRequest(prompt="a", session="tale")
    for size, stored in ((repeats.LARGEST_ANSWER, True), (repeats.LARGEST_ANSWER + 1, False)):
        note = repeats.Note().after(body, "one", '"' * size)
        assert len(note.encoded()) < 2 * repeats.LARGEST_ANSWER + 500
        if stored:
            assert note.answered(body, "one") == '"' * size
    with pytest.raises(errors.ApiError, match="is not stored, as it was too long"):
        note.answered(body, "one")
    settings = ServeSettings(session_bytes=4 * repeats.LARGEST_ANSWER + 100_000)
    sessions = Service(made.model, made.vocab, made.weights, settings, "it").sessions
    sessions.open("a")
    sessions.open("b")
    with pytest.raises(errors.SessionError, match="there are 2 sessions"):
        sessions.open("c")
