"""The server, asked by OpenAI's own client and by plain HTTP."""

import json

import pytest

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

from transformer_xl.apps.serve import serve_settings  # noqa: E402  (it needs these)

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


def test_a_session_goes_on_and_reads_only_what_is_new(client, made, http):
    whole = made.alone("once upon", 30, seed=4)
    first = complete(client, "once upon", max_tokens=12, seed=4, extra_body={"session": "tale"})
    second = complete(client, "", max_tokens=18, extra_headers={"X-Session": "tale"})
    assert first.choices[0].text + second.choices[0].text == whole
    assert (first.usage.prompt_tokens, first.usage.total_tokens) == (9, 21)
    assert second.usage.prompt_tokens == 0
    about = http.get("/v1/sessions/tale").json()
    assert (about["remembered"], about["turns"]) == (12, 2)
    assert "".join(about["texts"]) == ("once upon" + whole)[-13:]
    assert [s["id"] for s in http.get("/v1/sessions").json()["data"]] == ["tale"]
    assert http.delete("/v1/sessions/tale").json()["deleted"]
    assert http.get("/v1/sessions/tale").status_code == 404


def test_a_session_remembers_what_is_read_without_tokens_to_draw(client, http):
    for prompt, texts in (("abc", "abc"), ("de", "abcde")):
        complete(client, prompt, max_tokens=0, extra_body={"session": "read"})
        assert "".join(http.get("/v1/sessions/read").json()["texts"]) == texts
    error = http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 10**7}).json()["error"]
    assert (error["code"], error["param"]) == ("too_long", "max_tokens")


def test_tokens_are_placed_behind_the_text_that_they_have_there(make_model, run_server):
    made = make_model(vocab="words")
    ids = made.vocab.encode("., .,")
    with run_server(made) as server:
        for length in (len("., .,"), len(" ., .,")):
            body = {"prompt": ids, "max_tokens": 2, "seed": 1, "session": "words", "logprobs": 0}
            found = httpx.post(server.address + COMPLETIONS, json=body).json()["choices"][0]
            assert found["logprobs"]["text_offset"][0] == length


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


REFUSED = [
    ({}, "prompt is missing: give the text to continue"),
    ({"prompt": 5}, "prompt=5 must be a text or a list"),
    ({"prompt": [1, -5]}, "prompt.1=-5 must be at least 0"),
    ({"prompt": [5, 999]}, "token 999 is outside the vocabulary"),
    ({"prompt": "Ä"}, "not in the vocabulary"),
    ({"prompt": "\ud800"}, "half of a surrogate pair"),
    ({"model": "gpt"}, "there is no model 'gpt'"),
    ({"topk": 3}, "'topk' is no field: GET /openapi.json lists them"),
    ({"echo": True}, "echo and scores of prompts are gone: txl score"),
    ({"n": 0}, "n=0 must be at least 1"),
    ({"n": True}, "n=True must be an integer"),
    ({"n": 1000}, "1 prompts times n=1000 must be at most 256"),
    ({"n": 2, "session": "x"}, "a session is continued by one text"),
    ({"max_tokens": 10**7}, "max_tokens=10000000 must be at most 1000000"),
    ({"temperature": "1"}, "temperature='1' must be a number"),
    ({"stream": "yes"}, "stream='yes' must be true or false"),
    ({"top_k": 2**70}, f"top_k={2**70} must be below 2**64"),
    ({"dry_allowed_length": 3}, "dry_allowed_length=3 has no effect"),
    ({"stop": [""]}, "stop.0='' must be a text of at least 1 characters"),
    ({"session": "../x"}, "session='../x' must be a text that matches"),
    (b'{"prompt": }', "the body is not valid JSON: Expecting value, character 11"),
    (b'{"prompt": "a", "temperature": NaN}', "temperature=nan must be a finite number"),
    (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", ""),
    (b"[" * 100_000, ""),
    (b"null", "the body=None must be an object"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED, ids=lambda x: repr(x)[:40])
def test_what_is_wrong_is_said_in_words_and_in_the_shape_of_openai(http, body, message):
    if isinstance(body, dict):
        body = {"prompt": "a"} | body if body else body
        # As JSON writes it: httpx cannot send half of a surrogate pair.
        body = json.dumps(body).encode()
    answer = http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == (404 if error["code"] == "model_not_found" else 400)
    assert error.keys() == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert "nput should" not in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("PUT", COMPLETIONS, 405),
        ("POST", COMPLETIONS, 415),
        ("GET", "/v1/sessions/nobody", 404),
        ("GET", "/v1/sessions/..%2f..%2fetc", 404),
        ("GET", "/v1/sessions/a%0a", 400),
    ],
)
def test_a_wrong_address_is_said_in_the_shape_of_openai(http, method, path, status):
    answer = http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


def test_several_texts_are_streamed_as_they_are_drawn(client, made):
    chunks = list(complete(client, ["ab", "c"], n=2, max_tokens=60, seed=10, stream=True))
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    order = [chunk.choices[0].index for chunk in chunks]
    for index, prompt in enumerate(("ab", "ab", "c", "c")):
        text = "".join(x.choices[0].text for x in chunks if x.choices[0].index == index)
        assert text == made.alone(prompt, 60, seed=10 + index)
    # The first text has not ended when the last one begins.
    assert order.index(3) < len(order) - 1 - order[::-1].index(0)


def test_an_empty_prompt_is_the_end_of_a_line(client, http, made):
    expected = [made.alone("\n", 9, seed=4 + n) for n in range(2)]
    for prompt in ("", [], [[]], ["", ""]):
        texts = [x.text for x in complete(client, prompt, max_tokens=9, seed=4).choices]
        assert texts == expected[: max(len(prompt), 1)]
    found = complete(client, "", max_tokens=9, seed=4, logprobs=0)
    assert found.choices[0].text == "".join(found.choices[0].logprobs.tokens) == expected[0]
    # It was read, and is no part of what was given.
    assert found.usage.prompt_tokens == 1
    first = complete(client, "", max_tokens=4, seed=4, extra_body={"session": "begun"})
    second = complete(client, "", max_tokens=5, extra_body={"session": "begun"})
    assert first.choices[0].text + second.choices[0].text == expected[0]
    http.delete("/v1/sessions/begun")


def test_what_of_a_prompt_is_read_as_unknown_is_in_the_answer(make_model, run_server):
    with run_server(made := make_model(vocab="words")) as server:

        def ask(prompt, **body):
            body |= {"prompt": prompt, "max_tokens": 3, "seed": 1}
            return httpx.post(server.address + COMPLETIONS, json=body)

        found = ask([".,", "the dog\n., []"]).json()
        about = "'the', 'dog', '[]' (3 in all, the first in line 1)"
        assert found["warnings"] == [f"prompt: not in the vocabulary: {about}; read as <unk>"]
        for known in (".,", [made.vocab.unk_id]):
            assert "warnings" not in ask(known).json()
        # In a stream, the first event has them.
        first, *others = ask("., []", stream=True).text.strip().split("\n\n")
    assert "'[]' (1 in all" in json.loads(first.removeprefix("data: "))["warnings"][0]
    assert not any("warnings" in event for event in others)


def test_where_no_token_begins_a_text_an_empty_prompt_is_refused(made, run_server, monkeypatch):
    monkeypatch.setitem(vars(made.vocab), "start_id", None)
    with run_server(made) as server:
        for more in ({}, {"session": "new"}, {"stream": True}, {"prompt": ["a", ""]}):
            answer = httpx.post(server.address + COMPLETIONS, json={"prompt": ""} | more)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "empty_prompt")
            assert error["message"].endswith("give at least one token to continue")
        assert httpx.get(f"{server.address}/v1/sessions").json()["data"] == []


def test_the_path_of_a_model_may_have_slashes_and_names_are_accepted_hosts(made, run_server):
    with run_server(made, name="group/tiny", names=("Models.example", "*.b.example")) as server:
        url = f"{server.address}/v1/models"
        (listed,) = httpx.get(url).json()["data"]
        assert httpx.get(f"{url}/group%2Ftiny").json() == listed
        assert httpx.get(f"{url}/tiny").json()["error"]["code"] == "model_not_found"
        hosts = [
            "models.example",
            "MODELS.example.:443",
            "a.b.example",
            "10.1.2.3:80",
            "[fe80::1]:80",
        ]
        for host in [*hosts, "x.y", "b.example", "x.models.example", "1.evil.example"]:
            status = 200 if host in hosts else 400
            assert httpx.get(url, headers={"Host": host}).status_code == status, host


def test_pages_of_other_hosts_are_kept_out(http):
    plain = {"Content-Type": "text/plain"}
    body = json.dumps({"prompt": "a"}).encode()
    assert http.post(COMPLETIONS, content=body, headers=plain).status_code == 415
    answer = http.get("/v1/models", headers={"Host": "evil.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_host")
    assert "'evil.example' is not accepted: start txl serve with --names NAME" in answer.text
    answer = http.get("/v1/models", headers={"Origin": "http://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("host", ["LOCALHOST", "127.1", "2130706433", "::1", "::ffff:127.0.0.1"])
def test_each_spelling_of_a_loopback_address_accepts_its_own_names(host):
    assert serve_settings.ServeSettings(host=host).hosts == ("localhost", host.lower())
    assert not serve_settings.ServeSettings(host="0.0.0.0").hosts


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
        server.service.engine.cut()
        error = httpx.post(url, json=body).json()["error"]
        assert error["message"] == "the server is stopping: ask another one"


def test_the_page_needs_nothing_from_elsewhere(http):
    answer = http.get("/")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
    for word in ("http://", "https://", " style=", " onclick=", '<link rel="stylesheet', "src="):
        found = answer.text.replace("http://www.w3.org/2000/svg", "")
        assert word not in found, word
    for part in ("class TokenView {", ".tokens .chosen {"):
        assert answer.text.count(part) == 1
