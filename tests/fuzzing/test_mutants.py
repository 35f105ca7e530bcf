"""The readers of old files take a few mutants of each kind without a violation."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="needs limits of processes"),
]


def test_no_mutant_runs_anything_or_takes_long():
    program = Path(__file__).with_name("fuzzing.py")
    command = [sys.executable, str(program), "--mutants", "20"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert len(json.loads(ended.stdout)["files"]) == 34
