"""The program that measures the server under load, at toy size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

for _name in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]' httpx")

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "serving.py"


@pytest.mark.slow
def test_no_answer_is_wrong_and_no_session_is_lost(made, tmp_path, is_nightly):
    path = tmp_path / "measured.json"
    sessions, requests, pile = (4, 16, 20) if is_nightly else (2, 4, 4)
    words = ["--sessions", f"{sessions}", "--requests", f"{requests}", "--length", "4", "--kill"]
    words += ["--pile", f"{pile}", "--rounds", f"{sessions}"]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(made.folder), *words, "--json", str(path)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    # Those of the one client, one in each round, are compared, too.
    assert found["compared"]["right"] + len(found["compared"]["ties"]) == requests + sessions
    one = found["one_client"]["requests"]
    assert one == len(found["times_one_client_each_round"]) == sessions
    assert found["load"]["processor_ms_per_token"]["engine"] > 0
    assert found["kill"]["right"] + found["kill"]["ties"] == requests
    assert sum(found["kill"]["sessions"].values()) == sessions
    assert found["load"]["tokens_per_second"] > 0
    assert [row["sessions"] for row in found["pile"]][-1] == pile
