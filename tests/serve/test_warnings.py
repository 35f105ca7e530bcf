"""What of a prompt the model is not shown as it is, is said in the answer."""

import json

import pytest

from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.config import ModelConfig
from transformer_xl.data import train_vocab
from transformer_xl.model import TransformerXL


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    for name in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
        pytest.importorskip(name, reason="needs pip install 'transformer-xl[serve]'")
    from fastapi.testclient import TestClient

    from transformer_xl.apps.serve.api import create_app
    from transformer_xl.apps.serve.service import Service

    vocab = train_vocab("words", ["the cat\n"], held_out=["a"])
    model = TransformerXL(
        ModelConfig(vocab_size=len(vocab), n_layer=1, n_head=1, d_model=8, d_inner=8, mem_len=4)
    ).eval()
    folder = tmp_path_factory.mktemp("words")
    model.save_pretrained(folder, vocab)
    service = Service(model, vocab, folder / "model.safetensors", ServeSettings(), "words")
    with TestClient(create_app(service), base_url="http://127.0.0.1") as client:
        yield lambda prompt, **body: client.post(
            "/v1/completions", json={"prompt": prompt, "max_tokens": 3, "seed": 1, **body}
        )


def test_what_of_a_prompt_is_read_as_unknown_is_in_the_answer(asked):
    found = asked(["the cat", "the dog\nthe []"]).json()
    # The brackets are also what stands for choices where a stream has none.
    about = "'dog', '[]' (2 in all, the first in line 1)"
    assert found["warnings"] == [f"prompt: not in the vocabulary: {about}; read as <unk>"]
    assert "warnings" not in asked("the cat").json()
    unknown = train_vocab("words", ["the cat\n"], held_out=["a"]).unk_id
    assert "warnings" not in asked([unknown]).json()


def test_the_first_event_of_a_stream_has_the_warnings(asked):
    events = asked("the []", stream=True).text.strip().split("\n\n")
    assert events.pop() == "data: [DONE]"
    events = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "'[]' (1 in all" in events[0]["warnings"][0]
    assert events[0]["choices"]
    assert not any("warnings" in event for event in events[1:])
