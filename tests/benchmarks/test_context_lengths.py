import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_models_are_trained_and_measured_on_a_text_of_known_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "found.json"
    words = ("--out", tmp_path / "runs", "--steps", 3, "--pairs", 3000, "--step", 4, "--marks", 3)
    words += ("--d_model", 16, "--tokens", 300, "--models", "recurrence", "lstm", "--json", path)
    command = [sys.executable, PROGRAMS / "recl.py", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["true_length"] == 12
    assert found["contexts"] == [4, 8, 12, 16, 20, 24]
    *trained, oracle = found["models"]
    assert [model["name"] for model in trained] == ["recurrence", "lstm"]
    assert all(model["parameters"] > 0 for model in trained)
    # Who knows the rule is measured to look back as far as the rule goes.
    assert {length["length"] for length in oracle["recl"].values()} == {12}
    assert "| oracle | 12 | 12 | 12 |" in done.stdout

    monkeypatch.syspath_prepend(str(PROGRAMS))
    recorded = import_module("record").recorded(path)
    assert recorded["kind"] == "recl"
    assert str(tmp_path) not in json.dumps(recorded)
