"""States of texts in a server: forked, taken back, and found again by a later prompt."""

import numpy as np
import pytest

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")
httpx = pytest.importorskip("httpx")

from transformer_xl.apps.serve.prefixes import Prefixes  # noqa: E402  (it needs these)
from transformer_xl.inference.generate import generate  # noqa: E402


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.address, timeout=60) as found:
        yield found


def complete(http, prompt, **more):
    body = {"prompt": prompt, "temperature": 0.5, **more}
    answer = http.post("/v1/completions", json=body).json()
    return answer["choices"][0]["text"], answer["usage"]


def test_a_forked_session_goes_on_by_itself(made, http):
    first, _ = complete(http, "once upon", max_tokens=12, seed=4, session="trunk")
    told = http.post("/v1/sessions/trunk/fork", json={"to": "branch"}).json()
    assert told["id"] == "branch"
    rest, usage = complete(http, "", max_tokens=18, session="trunk")
    assert first + rest == made.alone("once upon", 30, seed=4, temperature=0.5)
    assert (usage["prompt_tokens"], usage["recomputed_tokens"]) == (0, 0)
    assert complete(http, "", max_tokens=18, session="branch")[0] == rest
    for names, status in ((("trunk", "branch"), 409), (("none", "new"), 404)):
        answer = http.post(f"/v1/sessions/{names[0]}/fork", json={"to": names[1]})
        assert answer.status_code == status
    assert (
        "delete it, or take another name"
        in http.post("/v1/sessions/trunk/fork", json={"to": "branch"}).json()["error"]["message"]
    )


def test_the_last_tokens_of_a_session_are_taken_back(made, http):
    complete(http, "abc", max_tokens=40, seed=1, session="back")
    before = http.get("/v1/sessions/back").json()
    assert (before["n_tokens"], before["rewindable"]) == (43, 42)
    assert http.post("/v1/sessions/back/rewind", json={"tokens": 30}).status_code == 200
    after = http.get("/v1/sessions/back").json()
    assert (after["n_tokens"], after["rewindable"]) == (13, 12)
    assert after["checksum"] != before["checksum"]
    text = "".join(after["texts"])
    found, _ = complete(http, "d", max_tokens=20, seed=3, session="back")
    assert found == made.alone(f"{text}d", 20, seed=3, temperature=0.5)
    wrong = http.post("/v1/sessions/back/rewind", json={"tokens": 34})
    assert wrong.json()["error"]["code"] == "not_rewindable"
    assert "n=34 must be at most rewindable=33" in wrong.json()["error"]["message"]
    assert http.post("/v1/sessions/none/rewind", json={"tokens": 1}).status_code == 404


def test_a_prompt_is_read_from_where_it_parts_from_an_earlier_text(made, http):
    prompt = "the quick brown fox"
    first, usage = complete(http, prompt, max_tokens=10, seed=1)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    for n, more in ((29, " and so on"), (19, ", the lazy dog"), (4, "")):
        asked = (prompt + first)[:n] + more
        found, usage = complete(http, asked, max_tokens=10, seed=2)
        assert found == made.alone(asked, 10, seed=2, temperature=0.5)
        assert usage["prompt_tokens"] == len(asked)
        assert usage["prompt_tokens_details"]["cached_tokens"] >= n - 1
        assert usage["recomputed_tokens"] == 0


def state_of(model, tokens, rewindable):
    return generate(model, tokens, length=0, rewindable=rewindable).state


def test_states_are_found_by_their_tokens_and_forgotten_by_their_bytes(made):
    long = [n % 7 for n in range(60)]
    states = {n: state_of(made.model, long[:n], 9) for n in (20, 60)}
    assert (states[20].rewindable, states[60].rewindable) == (19, 9)
    prefixes = Prefixes(sum(x.nbytes for x in states.values()) + 10)
    assert prefixes.find(long) == (None, 0)
    for n, state in states.items():
        prefixes.add(long[:n], state)
    for asked, n_cached, n_known in (
        (long, 60, 60),
        ([*long, 8], 60, 60),
        ([*long[:52], 8], 52, 52),
        # What is known of it is too far back in the one, and the end of the other.
        ([*long[:40], 8], 20, 40),
        ([*long[:5], 8], 5, 5),
        ([8, *long], None, 0),
    ):
        state, known = prefixes.find(asked)
        assert (state and state.n_tokens, known) == (n_cached, n_known)
        if state:
            assert np.array_equal(state.tokens, asked[:n_cached])
    # The one that was used last stays.
    prefixes.find(long[:5])
    prefixes.add([8] * 20, state_of(made.model, [8] * 20, 0))
    assert prefixes.find(long)[0].n_tokens == 20
    assert not Prefixes(0).is_used
    nothing = Prefixes(10)
    nothing.add(long, states[60])
    assert nothing.find(long) == (None, 0)
