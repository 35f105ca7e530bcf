"""A run that is killed at any moment, also while it saves, goes on as if nothing had happened."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "kills.py"

OPTIONS = {
    "average": "tail",
    "average_start": 0.4,
    "stages": ((0.0, 6, 6), (0.6, 8, 8)),
    "random_segment_len": True,
    "reset_memory": 0.3,
    "temporal_activation_reg": 1.0,
}

LOST = """
import os, signal, sys
import torch
import torch.distributed as dist
from transformer_xl.config.distributed import Stalled, World

if os.environ["RANK"] == "1":
    setattr(dist, sys.argv[1], lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL))
try:
    with World.join(torch.device("cpu"), minutes=0.05):
        pass
except Stalled as error:
    sys.exit(str(error))
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["init_process_group", "new_group"])
def test_a_process_lost_while_groups_connect_ends_the_others(where):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    about = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    first, lost = (
        subprocess.Popen(
            [sys.executable, "-c", LOST, where],
            env={**os.environ, **about, "RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    )
    try:
        _, said = first.communicate(timeout=300)
    finally:
        first.kill()
        lost.communicate()
    assert lost.returncode == -signal.SIGKILL
    assert first.returncode == 1
    assert "process 0 of 2 lost another one" in said


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_kill_at_any_moment_loses_nothing(tmp_path, toy_recipe, is_nightly, processes):
    # Two hundred are made by `python benchmarks/kills.py` in a quarter of an hour.
    kills = os.environ.get("TXL_KILLS", "8" if is_nightly else "2")
    for options in ({}, OPTIONS) if is_nightly else (OPTIONS,):
        recipe = tmp_path / "recipe.toml"
        settings = {"steps": 6, "save_every": 2, "eval_every": 3, "optimizer": "muon", **options}
        recipe.write_text(toy_recipe(train=settings).to_toml())
        command = [sys.executable, PROGRAM, "--recipe", recipe, "--processes", processes]
        result = subprocess.run(
            [*command, "--kills", kills, "--in_a_row", "4" if is_nightly else "2"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        found = json.loads(result.stdout)
        assert found["wrong"] == []
        assert found["kills"] >= int(kills)
        assert result.returncode == 0, result.stderr
