"""The program that kills servers that share sessions, with few kills."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (shutil.which("redis-server") and shutil.which("haproxy")),
        reason="needs Redis and haproxy: apt install redis-server haproxy",
    ),
]
for _name in ("fastapi", "uvicorn", "prometheus_client", "httpx", "redis"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve,redis]' httpx")

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "shared_sessions.py"


def test_servers_that_are_killed_lose_no_token_and_write_none_twice(tmp_path, is_nightly):
    path = tmp_path / "measured.json"
    kills = 6 if is_nightly else 2
    words = ["--servers", "2", "--kills", f"{kills}", "--clients", "4", "--seed", "3"]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words, "--json", str(path)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(path.read_text())
    assert sum(found["happened"].values()) == kills
    assert found["answers_right"] + found["ties"] == found["answers"] > 3 * kills
    assert found["failures"] == found["sessions_that_remember_other_tokens"] == []
