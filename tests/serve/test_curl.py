"""The calls of curl on the page of common tasks get the answers that the page speaks of."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")

from transformer_xl import from_pretrained, shipped_path  # noqa: E402  (the server needs these)

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_every_call_of_curl_on_the_page_is_answered(made, run_server, tmp_path):
    model, vocab = from_pretrained("shakespeare")
    shipped = type(made)(shipped_path("shakespeare"), model, vocab)
    text = PAGE.read_text("utf-8").replace("\\\n", " ")
    calls = re.findall(r"^curl .*$", text, re.M)
    assert len(calls) == text.count("curl -s")
    answers = []
    with run_server(shipped, sessions=tmp_path) as server:
        for call in calls:
            line = call.replace("http://127.0.0.1:8000", server.address)
            # With --fail, a status of 400 or more is an error of curl.
            done = subprocess.run(
                ["sh", "-c", line.replace("curl ", "curl --fail-with-body ", 1)],
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, (call, done.stdout, done.stderr)
            answers.append(done.stdout)
    first, begun, more, stream, chat, _ready = answers
    assert json.loads(first)["choices"][0]["text"]
    assert json.loads(begun)["choices"][0]["text"] != json.loads(more)["choices"][0]["text"]
    assert stream.rstrip().endswith("data: [DONE]")
    assert json.loads(chat)["choices"][0]["message"]["role"] == "assistant"
