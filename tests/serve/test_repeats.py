"""A request that is sent twice appends once: keys, turns, and clients that have left."""

import socket

import pytest

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")
httpx = pytest.importorskip("httpx")

from transformer_xl.apps.serve import repeats  # noqa: E402  (it needs these)

ASKED = {"prompt": "abc", "session": "tale", "max_tokens": 7}


def post(server, key=None, **body):
    headers = {} if key is None else {"Idempotency-Key": key}
    url = server.address + "/v1/completions"
    return httpx.post(url, json=ASKED | body, headers=headers, timeout=60)


def turns(server, name="tale"):
    return httpx.get(f"{server.address}/v1/sessions/{name}").json()["turns"]


def test_the_same_key_gets_the_same_answer_and_appends_nothing(made, run_server, tmp_path):
    with run_server(made, sessions=tmp_path) as server:
        first = post(server, "one", seed=3).json()
        assert "repeated" not in first or first["repeated"] is None
        again = post(server, "one", seed=3).json()
        assert again["repeated"] is True
        for name in ("choices", "usage", "settings", "session_turn"):
            assert again[name] == first[name]
        second = post(server, "two", prompt="d", max_tokens=5).json()
    # After a restart, too, and in a stream.
    with run_server(made, sessions=tmp_path) as server:
        again = post(server, "two", prompt="d", max_tokens=5).json()
        assert again["choices"] == second["choices"]
        assert again["settings"]["seed"] is None
        streamed = post(server, "one", seed=3, stream=True).text
        assert first["choices"][0]["text"] in streamed.encode().decode("unicode_escape")
        assert "[DONE]" in streamed
        assert turns(server) == 2
        third = post(server, prompt="", max_tokens=4).json()["choices"][0]["text"]
    written = [made.alone("abc", 7, seed=3)]
    assert first["choices"][0]["text"] == written[0]
    with run_server(made) as server:
        for key, body in (("one", {"seed": 3}), ("two", {"prompt": "d", "max_tokens": 5})):
            post(server, key, **body)
        assert post(server, prompt="", max_tokens=4).json()["choices"][0]["text"] == third


def test_an_answer_that_a_stop_string_ended_is_told_again_as_it_was(made, run_server):
    whole = made.alone("abc", 12, seed=3)
    body = {"seed": 3, "max_tokens": 12, "stop": [whole[4:6]], "echo": True}
    with run_server(made) as server:
        first, again = [post(server, "one", **body).json() for _ in range(2)]
        (choice,) = first["choices"]
        assert choice["text"] == "abc" + whole[: whole.index(whole[4:6])]
        assert len(choice["token_ids"]) < first["usage"]["completion_tokens"]
        assert (again["choices"], again["usage"]) == (first["choices"], first["usage"])


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
        for body in ({"session": None}, {"logprobs": 1}, {"attention": 2}):
            assert post(server, "two", **body).status_code == 400
        assert post(server, "a key").status_code == 400
        assert post(server, "x" * 256).status_code == 400
        assert post(server, session=None, session_turn=0).status_code == 400


def test_a_request_for_another_turn_is_refused(made, run_server):
    with run_server(made) as server:
        assert post(server, "0", session_turn=0).json()["session_turn"] == 1
        for n in range(1, 12):
            answer = post(server, f"{n}", prompt="", max_tokens=1, session_turn=n).json()
            assert answer["session_turn"] == n + 1
        for key, turn in (("0", 0), (None, 11), (None, 13)):
            # The answer of the first key is forgotten.
            refused = post(server, key, session_turn=turn)
            assert refused.status_code == 409
            assert refused.json()["error"]["code"] == "session_at_another_turn"
        assert turns(server) == 12


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
        until(lambda: not server.service.sessions.find("tale").is_busy)
        answer = post(server, "one", max_tokens=400, seed=5).json()
        assert answer["repeated"] is True
        assert answer["choices"][0]["text"] == made.alone("abc", 400, seed=5)


def test_notes_are_bounded_and_damage_is_told():
    notes = repeats.Notes()
    for n in range(30):
        told = repeats.Told(f"{n}", "x", n + 1, [1], "y" * 50_000, "length")
        notes = notes.after(told)
        assert notes.told[-1] is told
    assert notes.turns == 30
    assert len(notes.encoded()) < 300_000
    huge = repeats.Told("z", "x", 31, [1], "y" * 400_000, "length")
    assert [each.key for each in notes.after(huge).told] == ["z"]
    assert repeats.notes_of("") == repeats.Notes()
    for damaged in ("{", "[]", '{"turns": -1}', '{"turns": 1, "more": 2}', '{"told": [{}]}'):
        with pytest.raises(RuntimeError, match="damaged"):
            repeats.notes_of(damaged)


def test_an_invalid_header_is_named_with_its_own_rule(made, run_server):
    rules = {
        "Idempotency-Key": "must be 1 to 255 printable ASCII characters without spaces",
        "X-Session": "must be a name of 1 to 64 letters, digits, dots, dashes and underscores",
    }
    with run_server(made) as server:
        for header, rule in rules.items():
            answer = httpx.post(
                server.address + "/v1/completions", json=ASKED, headers={header: "order 17"}
            )
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, header)
            assert error["message"].startswith(f"{header}='order 17' {rule}")
