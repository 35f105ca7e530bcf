"""A run that is killed at any moment, also while it saves, goes on as if nothing had happened.

This file is also the program that is killed: it loads torch once and forks a process for each
part of a run.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

from transformer_xl.recipes import dump_recipe, load_recipe

FILE_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
# A run makes some two hundred; all of them take two minutes. A prime, so that each kind of moment
# has its turn.
STRIDE = int(os.environ.get("TXL_KILL_STRIDE", "29"))


OPTIONS = {
    "average": "tail",
    "average_start": 0.4,
    "stages": ((0.0, 6, 6), (0.6, 8, 8)),
    "random_segment_len": True,
    "temporal_activation_reg": 1.0,
}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "average, stages, lengths"])
def test_a_kill_at_any_moment_loses_nothing(tmp_path, toy_recipe, options):
    recipe = tmp_path / "recipe.toml"
    settings = {"steps": 6, "save_every": 2, "eval_every": 3, "optimizer": "muon", **options}
    config = toy_recipe(train=settings)
    recipe.write_text(dump_recipe(config))
    command = [sys.executable, __file__, str(recipe), str(tmp_path / "runs")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["wrong"] == {}
    assert found["killed"] >= 6


class Runs:
    """Makes runs in forked processes that can be killed."""

    def __init__(self, recipe, folder):
        self.config, self.folder = load_recipe(recipe), folder

    def part(self, folder, *, at_event=None, after_seconds=None):
        """Train in a process; kill it before a file operation or after a time; return its end."""
        process = os.fork()
        if process == 0:
            self._train(folder, at_event)
        if after_seconds is not None:
            time.sleep(after_seconds)
            os.kill(process, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    def _train(self, folder, at_event):
        from transformer_xl.train import train

        code = 1
        try:
            left = [0]

            def count(event, arguments):
                if event in FILE_EVENTS and (str(folder) in str(arguments[0]) or "re" in event):
                    left[0] += 1
                    if left[0] == at_event:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count)
            train(self.config, folder, quiet=True)
            (folder.parent / "events").write_text(str(left[0]))
            code = 0
        except Exception:
            traceback.print_exc()
            raise
        finally:
            os._exit(code)

    def whole(self):
        """Make the run that is not killed; return how many file operations it took."""
        from transformer_xl.train import train

        # Here first, so that the forked processes find all modules loaded.
        train(self.config, self.folder / "warm", quiet=True)
        assert self.part(self.folder / "whole") == 0
        return int((self.folder / "events").read_text())

    def differences(self, folder):
        """Say in what a run differs from the one that was not killed."""
        import torch

        from transformer_xl.train.metrics import read_metrics

        def end(run):
            checkpoints = sorted((run / "checkpoints").iterdir())
            state = torch.load(checkpoints[-1] / "state.pt", weights_only=True)
            records = read_metrics(run / "metrics.jsonl")
            about = {
                # A kill may leave one old checkpoint more, until the next one is saved.
                "names": sorted(
                    str(path.relative_to(run))
                    for path in run.rglob("*")
                    if not {*checkpoints[:-1]} & {path, *path.parents}
                ),
                "metrics": [{k: r[k] for k in r if k != "tokens_per_second"} for r in records],
                "state": [
                    str(state[key])
                    for key in ("mems", "optimizer", "step", "best", "average", "segments", "stage")
                ],
                "random": state["random"].tolist(),
            }
            for path in run.rglob("model.safetensors"):
                about[str(path.relative_to(run))] = path.read_bytes()
            return about

        torch.set_printoptions(threshold=sys.maxsize, precision=17)
        expected, found = end(self.folder / "whole"), end(folder)
        wrong = [key for key in expected if found.get(key) != expected[key]]
        return wrong + sorted({*found["names"]} ^ {*expected["names"]})


def main(recipe, folder):
    import torch

    from transformer_xl.data import prepare
    from transformer_xl.train import loop, metrics

    torch.set_num_threads(1)
    metrics.find_spec = lambda name: None
    loop.finish = lambda *about: {}
    folder.mkdir()
    runs = Runs(recipe, folder)
    prepare(runs.config.data)
    n_events = runs.whole()
    began = time.perf_counter()
    assert runs.part(folder / "warm again") == 0
    seconds = time.perf_counter() - began
    killed, wrong = 0, {}

    def finish(run, killed_when):
        code = runs.part(run)
        if code or (found := runs.differences(run)):
            wrong[killed_when] = f"exit code {code}" if code else found

    for event in range(1, n_events, STRIDE):
        run = folder / "killed"
        assert runs.part(run, at_event=event) == -signal.SIGKILL
        killed += 1
        finish(run, f"before file operation {event}")
        shutil.rmtree(run)
    draw = random.Random(0)
    for _ in range(5):
        delay = draw.uniform(0, seconds)
        killed += runs.part(folder / "often", after_seconds=delay) == -signal.SIGKILL
    finish(folder / "often", "five times at random moments")
    json.dump({"killed": killed, "wrong": wrong, "of": n_events, "seconds": seconds}, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
