"""A run that is killed at any moment, also while it saves, goes on as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_xl.config.recipes import dump_recipe

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "kills.py"
# Two hundred are made by `python benchmarks/kills.py`; all of them take a quarter of an hour.
KILLS = os.environ.get("TXL_KILLS", "8")

OPTIONS = {
    "average": "tail",
    "average_start": 0.4,
    "stages": ((0.0, 6, 6), (0.6, 8, 8)),
    "random_segment_len": True,
    "reset_memory": 0.3,
    "temporal_activation_reg": 1.0,
}


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "average, stages, lengths"])
def test_a_kill_at_any_moment_loses_nothing(tmp_path, toy_recipe, options, processes):
    recipe = tmp_path / "recipe.toml"
    settings = {"steps": 6, "save_every": 2, "eval_every": 3, "optimizer": "muon", **options}
    recipe.write_text(dump_recipe(toy_recipe(train=settings)))
    command = [
        sys.executable,
        PROGRAM,
        "--recipe",
        recipe,
        "--processes",
        processes,
        "--kills",
        KILLS,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = json.loads(result.stdout)
    assert found["wrong"] == []
    assert found["kills"] >= int(KILLS)
    assert result.returncode == 0, result.stderr
