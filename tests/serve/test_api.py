"""The server, asked by OpenAI's own client and by plain HTTP."""

import concurrent.futures
import contextlib
import json
import threading

import pytest

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.address, timeout=60) as found:
        yield found


def complete(client, prompt, **settings):
    return client.completions.create(model="tiny", prompt=prompt, **settings)


def test_a_seed_writes_what_generate_writes(client, made):
    for settings in [
        {},
        {"temperature": 0},
        {"top_p": 0.7, "temperature": 1.3},
        {"extra_body": {"top_k": 5}},
    ]:
        found = complete(client, "the cat", max_tokens=20, seed=7, **settings)
        drawing = settings | settings.get("extra_body", {})
        drawing.pop("extra_body", None)
        assert found.choices[0].text == made.alone("the cat", 20, seed=7, **drawing), settings
        assert found.choices[0].finish_reason == "length", settings
        assert found.usage.model_dump(exclude_none=True) == {
            "prompt_tokens": 7,
            "completion_tokens": 20,
            "total_tokens": 27,
        }, settings


def test_many_at_once_get_no_wrong_token(server, made):
    def ask(number):
        prompt = "some words of a text"[: 1 + number % 19]
        settings = {"max_tokens": 5 + number % 9, "seed": number, "temperature": 0.9}
        answer = httpx.post(
            server.address + COMPLETIONS, json={"prompt": prompt, **settings}, timeout=60
        )
        return prompt, settings, answer.json()["choices"][0]["text"]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for prompt, settings, text in pool.map(ask, range(16)):
            n = settings.pop("max_tokens")
            assert text == made.alone(prompt, n, **settings)


def test_a_session_goes_on_and_reads_only_what_is_new(client, made, http):
    whole = made.alone("once upon", 30, seed=4)
    first = complete(client, "once upon", max_tokens=12, seed=4, extra_body={"session": "tale"})
    second = complete(client, "", max_tokens=18, extra_headers={"X-Session": "tale"})
    assert first.choices[0].text + second.choices[0].text == whole
    assert second.usage.prompt_tokens == 0
    about = http.get("/v1/sessions/tale").json()
    assert (about["remembered"], about["turns"]) == (12, 2)
    assert "".join(about["texts"]) == ("once upon" + whole)[-13:]
    assert [s["id"] for s in http.get("/v1/sessions").json()["data"]] == ["tale"]
    assert http.delete("/v1/sessions/tale").json()["deleted"]
    assert http.get("/v1/sessions/tale").status_code == 404


def test_a_session_handles_one_request_at_a_time(server, http):
    body = {"prompt": "a", "max_tokens": 10**6, "session": "busy", "stream": True}
    with http.stream("POST", COMPLETIONS, json=body) as answer:
        # Kept: without its reader the answer is closed.
        lines = answer.iter_lines()
        next(lines)
        for ask in (
            lambda: http.post(COMPLETIONS, json={"prompt": "b", "session": "busy"}),
            lambda: http.delete("/v1/sessions/busy"),
        ):
            refused = ask()
            assert refused.status_code == 409
            assert "session 'busy' is in use" in refused.json()["error"]["message"]


def test_who_leaves_ends_the_request_and_the_session_goes_on(server, http, until, made):
    body = {"prompt": "abc", "max_tokens": 300, "session": "left", "seed": 1, "stream": True}
    with http.stream("POST", COMPLETIONS, json=body) as answer:
        lines = answer.iter_lines()
        for _ in range(12):
            next(lines)
    until(lambda: server.service.engine.n_running == 0)
    until(lambda: http.get("/v1/sessions/left").json().get("is_busy") is False)
    about = http.get("/v1/sessions/left").json()
    assert "".join(about["texts"]) in "abc" + made.alone("abc", 300, seed=1)
    threading.Thread(target=_impatient, args=[server], daemon=True).start()
    until(lambda: server.service.engine.n_running == 1)
    until(lambda: server.service.engine.n_running == 0)


def _impatient(server):
    with contextlib.suppress(httpx.ReadTimeout):
        httpx.post(
            server.address + COMPLETIONS, json={"prompt": "a", "max_tokens": 10**6}, timeout=0.3
        )


WRONG = {
    "no such address": ("GET", "/v1/nothing", None, 404),
    "no such method": ("PUT", COMPLETIONS, None, 405),
    "no such model": ("POST", COMPLETIONS, {"prompt": "a", "model": "gpt"}, 404),
    "no such field": ("POST", COMPLETIONS, {"prompt": "a", "topk": 1}, 400),
    "a wrong type": ("POST", COMPLETIONS, {"prompt": {"a": 1}}, 400),
    "out of range": ("POST", COMPLETIONS, {"prompt": "a", "temperature": -1}, 400),
    "beyond a rule of the settings": ("POST", COMPLETIONS, {"prompt": "a", "top_k": 2**70}, 400),
    "not supported": ("POST", COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 1}}, 400),
    "no effect": ("POST", COMPLETIONS, {"prompt": "a", "dry_allowed_length": 3}, 400),
    "no prompt": ("POST", COMPLETIONS, {"max_tokens": 3}, 400),
    "half a character": ("POST", COMPLETIONS, {"prompt": "\ud800"}, 400),
    "no such symbol": ("POST", COMPLETIONS, {"prompt": "Ä"}, 400),
    "no such token": ("POST", COMPLETIONS, {"prompt": [5, 999]}, 400),
    "too many tokens": ("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 10**7}, 400),
    "too many texts": ("POST", COMPLETIONS, {"prompt": "a", "n": 1000}, 400),
    "two texts of a session": ("POST", COMPLETIONS, {"prompt": "a", "n": 2, "session": "x"}, 400),
    "a path for a session": ("POST", COMPLETIONS, {"prompt": "a", "session": "../x"}, 400),
    "another path": ("GET", "/v1/sessions/..%2f..%2fetc", None, 404),
    "a name with a line": ("GET", "/v1/sessions/a%0a", None, 400),
    "no such session": ("GET", "/v1/sessions/nobody", None, 404),
    "no body": ("POST", COMPLETIONS, None, 415),
}


def test_what_is_wrong_is_said_in_the_shape_of_openai(http):
    for case in WRONG:
        method, path, body, status = WRONG[case]
        # As JSON writes it: httpx cannot send half of a surrogate pair.
        content = json.dumps(body).encode() if body else None
        headers = {"Content-Type": "application/json"} if body else {}
        answer = http.request(method, path, content=content, headers=headers)
        assert answer.status_code == status, case
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}, case
        assert len(error["message"]) > 10, case


def test_what_is_no_json_is_refused(http):
    for content, status in [
        (b"{", 400),
        (b"[" * 100_000, 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": "a", "temperature": NaN}', 400),
        (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", 400),
        (b"\xff\xfe", 400),
        (b"null", 400),
    ]:
        answer = http.post(
            COMPLETIONS, content=content, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == status, content[:40]
        assert answer.json()["error"]["message"], content[:40]


def test_what_is_wrong_is_said_in_words(http):
    for body, message in [
        ({}, "prompt is missing: give the text to continue"),
        ({"prompt": 5}, "prompt=5 must be a text or a list"),
        ({"prompt": [1, -5]}, "prompt.1=-5 must be at least 0"),
        ({"prompt": "a", "topk": 3}, "'topk' is no field: GET /openapi.json lists them"),
        ({"prompt": "a", "echo": True}, "echo and scores of prompts are gone: txl score"),
        ({"prompt": "a", "n": 0}, "n=0 must be at least 1"),
        ({"prompt": "a", "n": True}, "n=True must be an integer"),
        ({"prompt": "a", "n": "1"}, "n='1' must be an integer"),
        ({"prompt": "a", "temperature": "1"}, "temperature='1' must be a number"),
        ({"prompt": "a", "stream": "yes"}, "stream='yes' must be true or false"),
        ({"prompt": "a", "top_k": 2**70}, f"top_k={2**70} must be below 2**64"),
        ({"prompt": "a", "top_p": 1.5}, "top_p=1.5 must be at most 1"),
        ({"prompt": "a", "stop": [""]}, "stop.0='' must be a text of at least 1 characters"),
        ({"prompt": "a", "session": ".."}, "session='..' must"),
        ({"prompt": "a", "session": "s", "session_turn": True}, "=True must be an integer"),
        (
            {"prompt": "a", "stream": True, "stream_options": {"x": 1}},
            "'stream_options.x' is no field: GET /openapi.json lists them",
        ),
    ]:
        answer = http.post(COMPLETIONS, json=body)
        assert answer.status_code == 400, body
        said = answer.json()["error"]["message"]
        assert message in said, body
        assert "nput should" not in said, body
    headers = {"Content-Type": "application/json"}
    error = http.post(COMPLETIONS, content=b'{"prompt": }', headers=headers).json()["error"]
    assert error["message"] == "the body is not valid JSON: Expecting value, character 11"
    assert (error["param"], error["code"]) == (None, "json_invalid")


def test_several_texts_are_streamed_as_they_are_drawn(client, made):
    chunks = list(complete(client, ["ab", "c"], n=2, max_tokens=60, seed=10, stream=True))
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    order = [chunk.choices[0].index for chunk in chunks]
    for index, prompt in enumerate(("ab", "ab", "c", "c")):
        text = "".join(x.choices[0].text for x in chunks if x.choices[0].index == index)
        assert text == made.alone(prompt, 60, seed=10 + index)
    # The first text has not ended when the last one begins.
    assert order.index(3) < len(order) - 1 - order[::-1].index(0)


def test_errors_are_those_of_the_openai_client(client):
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match="not in the vocabulary"):
        complete(client, "Ä")


def test_an_empty_prompt_is_the_end_of_a_line(client, http, made):
    expected = [made.alone("\n", 9, seed=4 + n) for n in range(2)]
    for prompt in ("", [], [""], [[]], ["", ""], [[], []]):
        texts = [x.text for x in complete(client, prompt, max_tokens=9, seed=4).choices]
        assert texts == expected[: len(prompt) if prompt in (["", ""], [[], []]) else 1]
    found = complete(client, "", max_tokens=9, seed=4, logprobs=0)
    assert found.choices[0].text == "".join(found.choices[0].logprobs.tokens) == expected[0]
    # It was read, and is no part of what was given.
    assert found.usage.prompt_tokens == 1
    first = complete(client, "", max_tokens=4, seed=4, extra_body={"session": "begun"})
    second = complete(client, "", max_tokens=5, extra_body={"session": "begun"})
    assert first.choices[0].text + second.choices[0].text == expected[0]
    http.delete("/v1/sessions/begun")


def test_where_no_token_begins_a_text_an_empty_prompt_is_refused(made, run_server, monkeypatch):
    monkeypatch.setitem(vars(made.vocab), "start_id", None)
    with run_server(made) as server:
        for more in ({}, {"session": "new"}, {"stream": True}, {"prompt": ["a", ""]}):
            answer = httpx.post(server.address + COMPLETIONS, json={"prompt": ""} | more)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "empty_prompt")
            assert error["message"].endswith("give at least one token to continue")
        assert httpx.get(f"{server.address}/v1/sessions").json()["data"] == []


def test_pages_of_other_hosts_are_kept_out(http):
    plain = {"Content-Type": "text/plain"}
    body = json.dumps({"prompt": "a"}).encode()
    assert http.post(COMPLETIONS, content=body, headers=plain).status_code == 415
    assert http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 400
    answer = http.get("/v1/models", headers={"Origin": "http://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_models_health_and_numbers(client, http):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "transformer-xl"
    for path in ("/health", "/health/live", "/health/ready"):
        assert http.get(path).json() == {"status": "ok"}
    complete(client, "abc", max_tokens=4)
    page = http.get("/metrics").text
    for name in (
        'txl_requests_total{status="200"}',
        "txl_prompt_tokens_total",
        "txl_drawn_tokens_total",
        "txl_request_seconds_bucket",
        "txl_sessions ",
    ):
        assert name in page, name


def drawn(server):
    page = httpx.get(f"{server.address}/metrics").text
    return int(float(page.partition("\ntxl_drawn_tokens_total ")[2].partition("\n")[0]))


@pytest.mark.slow
def test_at_the_time_limit_what_was_drawn_is_returned(made, run_server, ask):
    with run_server(made, max_batch=1, max_seconds=0.5, max_tokens=10**6) as server:
        url, body = server.address + COMPLETIONS, {"prompt": "abc", "max_tokens": 10**6, "seed": 1}
        answer = httpx.post(url, json=body | {"n": 2}, timeout=60)
        assert answer.status_code == 200
        first, late = answer.json()["choices"]
        n = len(first["token_ids"])
        assert n > 0
        assert first["text"] == made.alone("abc", n, seed=1)
        assert (late["text"], late["token_ids"]) == ("", [])
        assert first["finish_reason"] == late["finish_reason"] == "length"
        assert answer.json()["usage"]["completion_tokens"] == drawn(server) == n
        # Another text has the only row until then.
        other = ask(made, [1], 10**6)
        server.service.engine.submit([other.text])
        answer = httpx.post(url, json=body | {"n": 2}, timeout=60)
        other.text.is_cancelled = True
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "late")
        assert drawn(server) == n


@pytest.mark.parametrize("waits", [True, False])
def test_a_request_that_has_not_begun_when_the_engine_stops_is_told_so(
    made, run_server, ask, until, waits
):
    found = []
    with run_server(made, max_batch=1, max_tokens=10**6) as server:
        engine = server.service.engine
        engine.submit([ask(made, [1], 10**6).text])
        until(lambda: engine.n_running)
        if not waits:
            engine.cut()
        waiting = threading.Thread(
            target=lambda: found.append(
                httpx.post(server.address + COMPLETIONS, json={"prompt": "abc"}, timeout=60)
            )
        )
        waiting.start()
        if waits:
            until(lambda: engine.n_waiting)
            engine.cut()
        waiting.join(60)
    error = found[0].json()["error"]
    assert (found[0].status_code, error["code"]) == (503, "stopping")
    assert error["message"] == "the server is stopping: ask another one"


def test_a_request_fits_the_limits_of_the_server_or_is_told_them(made, run_server):
    with run_server(made, max_tokens=8, max_queue=4) as server:
        url = server.address + COMPLETIONS
        answer = httpx.post(url, json={"prompt": "abc"}, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == answer["settings"]["max_tokens"] == 8
        assert httpx.post(url, json={"prompt": "a", "n": 4}, timeout=60).status_code == 200
        for body in ({"prompt": "a", "n": 5}, {"prompt": ["a"] * 5}):
            answer = httpx.post(url, json=body, timeout=60)
            assert answer.status_code == 400
            assert "must be at most 4" in answer.json()["error"]["message"]
