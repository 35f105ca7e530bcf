"""What of a prompt the model is not shown as it is, is said in the answer."""

import json

import pytest

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")
httpx = pytest.importorskip("httpx")


def test_what_of_a_prompt_is_read_as_unknown_is_in_the_answer(make_model, run_server):
    made = make_model(vocab="words")
    with run_server(made) as server:

        def ask(prompt, **body):
            body |= {"prompt": prompt, "max_tokens": 3, "seed": 1}
            return httpx.post(f"{server.address}/v1/completions", json=body)

        # The brackets are also what stands for choices where a stream has none.
        found = ask([".,", "the dog\n., []"]).json()
        about = "'the', 'dog', '[]' (3 in all, the first in line 1)"
        assert found["warnings"] == [f"prompt: not in the vocabulary: {about}; read as <unk>"]
        for known in (".,", [made.vocab.unk_id]):
            assert "warnings" not in ask(known).json()
        # In a stream, the first event has them.
        *events, done = ask("., []", stream=True).text.strip().split("\n\n")
    assert done == "data: [DONE]"
    first, *others = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "'[]' (1 in all" in first["warnings"][0]
    assert first["choices"]
    assert not any("warnings" in event for event in others)
