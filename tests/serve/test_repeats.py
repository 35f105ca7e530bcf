"""A request that is sent twice appends once: turns."""

import numpy as np
import pytest
import torch

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")
httpx = pytest.importorskip("httpx")

from transformer_xl.apps.serve import errors, sessions  # noqa: E402  (they need these)
from transformer_xl.inference.generate import State  # noqa: E402
from transformer_xl.model import Memory  # noqa: E402

ASKED = {"prompt": "abc", "session": "tale", "max_tokens": 7}


def post(server, headers=None, **body):
    url = server.address + "/v1/completions"
    return httpx.post(url, json=ASKED | body, headers=headers, timeout=60)


def test_a_request_for_another_turn_is_refused(made, run_server):
    with run_server(made) as server:
        assert post(server, session_turn=0).json()["session_turn"] == 1
        for n in range(1, 3):
            answer = post(server, prompt="", max_tokens=1, session_turn=n).json()
            assert answer["session_turn"] == n + 1
        for turn in (0, 2, 4):
            refused = post(server, session_turn=turn)
            assert refused.status_code == 409
            assert refused.json()["error"]["code"] == "session_at_another_turn"
        assert httpx.get(f"{server.address}/v1/sessions/tale").json()["turns"] == 3
        assert post(server, session=None, session_turn=0).status_code == 400


def test_the_header_of_the_version_before_is_named(made, run_server):
    with run_server(made) as server:
        refused = post(server, {"Idempotency-Key": "one"})
        assert refused.status_code == 400
        assert "Idempotency-Key is gone: send session_turn" in refused.text
        assert httpx.get(f"{server.address}/v1/sessions").json()["data"] == []


def test_a_note_of_the_version_before_has_its_turns_and_damage_is_told():
    def turns(note):
        return sessions.turns_of(
            State(source=Memory([torch.zeros(1, 0, 4)]), tokens=np.array([1]), note=note)
        )

    assert sessions.turns_of(None) == turns("") == 0
    assert turns('{"turns": 3, "key": "one", "answer": "{}", "told": [{"key": "one"}]}') == 3
    for damaged in ("{", "[]", '{"turns": -1}'):
        with pytest.raises(errors.SessionError, match="damaged"):
            turns(damaged)
