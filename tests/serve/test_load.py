"""The program that measures the server under load, at toy size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

for _name in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]' httpx")

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "serving.py"


@pytest.mark.slow
def test_no_answer_is_wrong_and_no_session_is_lost(made, tmp_path, is_nightly):
    path = tmp_path / "measured.json"
    sessions, requests, pile = (4, 16, 20) if is_nightly else (2, 4, 4)
    words = ["--sessions", f"{sessions}", "--requests", f"{requests}", "--length", "4", "--kill"]
    words += ["--pile", f"{pile}", "--rounds", f"{sessions}"]
    command = [sys.executable, str(PROGRAM), str(made.folder), *words, "--json", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["compared"]["right"] + len(found["compared"]["ties"]) == requests + sessions
    assert found["one_client"]["requests"] == sessions
    assert found["kill"]["right"] + found["kill"]["ties"] == requests
    assert sum(found["kill"]["sessions"].values()) == sessions
    assert found["load"]["tokens_per_second"] > 0
    assert [row["sessions"] for row in found["pile"]][-1] == pile
