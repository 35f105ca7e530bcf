"""Runs under torchrun, as people start them: workers are killed, machines die, processes hang."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from transformer_xl.train.metrics import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc").exists(), reason="/proc tells whom a launcher started"),
]
STEPS = 240
KILLED_AFTER = 60
LONGEST_SECONDS = 200


@pytest.fixture
def launch(tmp_path, toy_recipe, request):
    """Start torchrun on a recipe; everything ends with the test."""
    steps = 100_000 if "comes_back" in request.node.name else STEPS
    settings = {"steps": steps, "save_every": 20, "eval_every": 0, "hang_minutes": 0.1}
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(toy_recipe(train=settings).to_toml())
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    started = []

    def start(*options):
        log = (tmp_path / f"log-{len(started)}").open("w+")
        command = [sys.executable, "-m", "torch.distributed.run", *options]
        command += ["-m", "transformer_xl", "train", str(recipe), "--out", str(tmp_path / "run")]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        started.append((process, log))
        return process

    yield start
    for process, log in started:
        if process.poll() is None:
            for left in (process.pid, *workers_of(process)):
                os.kill(left, signal.SIGKILL)
            process.wait()
        log.close()


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def steps_in(run):
    log = run / "metrics.jsonl"
    return [r["step"] for r in read_metrics(log) if r["kind"] == "train"] if log.exists() else []


def wait_until(is_so):
    until = time.monotonic() + LONGEST_SECONDS
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.05)


def wait_for_steps(run, process):
    def is_so():
        assert process.poll() is None
        return max(steps_in(run), default=0) >= KILLED_AFTER

    wait_until(is_so)


def workers_of(process):
    """The processes that an agent has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children]


def is_complete(run):
    return steps_in(run) == list(range(2, STEPS + 1, 2)) and (run / "results.json").exists()


def test_a_killed_worker_is_started_again_and_the_run_goes_on(tmp_path, launch):
    process = launch("--nproc-per-node", "2", "--max-restarts", "1", "--standalone")
    wait_for_steps(tmp_path / "run", process)
    os.kill(workers_of(process)[-1], signal.SIGKILL)
    assert process.wait(LONGEST_SECONDS) == 0
    assert is_complete(tmp_path / "run")
    assert "resuming after step" in (tmp_path / "log-0").read_text()


@pytest.fixture
def machines(tmp_path, launch):
    """Start launchers of one process each, two of which train together; kill the second."""
    port = free_port()
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "9"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf"]
    # How soon a silent machine counts as dead.
    options += ["keep_alive_interval=2,keep_alive_max_attempt=10,last_call_timeout=3"]

    def listens():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    # The first holds the rendezvous.
    first = launch(*options)
    wait_until(listens)
    second = launch(*options)
    wait_for_steps(tmp_path / "run", first)
    said = [(tmp_path / name).read_text() for name in ("log-0", "log-1")]
    # The one with the first rank speaks.
    assert sum("on 2 x cpu" in text for text in said) == 1
    for process in (second.pid, *workers_of(second)):
        os.kill(process, signal.SIGKILL)
    return first, lambda: launch(*options)


def test_a_machine_that_comes_back_is_let_in(tmp_path, machines):
    log = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: "parameters on cpu in" in (tmp_path / "log-0").read_text())
    machines[1]()
    logs = [tmp_path / f"log-{n}" for n in range(3)]
    wait_until(lambda: sum(each.read_text().count("on 2 x cpu") for each in logs) == 2)
    before = len(log.read_text())
    wait_until(lambda: len(log.read_text()) > before)


def test_when_one_of_two_machines_dies_the_other_goes_on(tmp_path, machines):
    assert machines[0].wait(LONGEST_SECONDS) == 0
    assert is_complete(tmp_path / "run")
    assert "parameters on cpu in" in (tmp_path / "log-0").read_text()


def test_a_process_that_hangs_is_found_and_the_run_goes_on(tmp_path, launch):
    process = launch("--nproc-per-node", "2", "--max-restarts", "1", "--standalone")
    wait_for_steps(tmp_path / "run", process)
    os.kill(workers_of(process)[-1], signal.SIGSTOP)
    assert process.wait(LONGEST_SECONDS) == 0
    assert is_complete(tmp_path / "run")
    assert "did not answer within the time limit" in (tmp_path / "log-0").read_text()


def test_a_machine_that_is_taken_away_loses_no_step(tmp_path, launch):
    process = launch("--nproc-per-node", "2", "--standalone")
    wait_for_steps(tmp_path / "run", process)
    # As Slurm and Kubernetes do before they take a machine.
    os.kill(process.pid, signal.SIGTERM)
    process.wait(LONGEST_SECONDS)
    said = (tmp_path / "log-0").read_text()
    assert "and saved; the same command resumes from there" in said
    stopped = max(steps_in(tmp_path / "run"))
    process = launch("--nproc-per-node", "2", "--standalone")
    assert process.wait(LONGEST_SECONDS) == 0
    assert is_complete(tmp_path / "run")
    after = int(said.split("stopped at step ")[1].split()[0])
    assert stopped <= after
    assert f"resuming after step {after} of {STEPS}" in (tmp_path / "log-1").read_text()
