"""Several processes train what one process trains.

This file is also the program of these processes: it does one thing after the other, each time as
a new group, and writes down what it found.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from transformer_xl.config.distributed import Stalled, World
from transformer_xl.config.recipes import load_recipe
from transformer_xl.data import prepare
from transformer_xl.train import Interrupted, loop, train
from transformer_xl.train.beginning import fit_to_corpus, new_state
from transformer_xl.train.checkpoint.checkpoints import read_about, read_whole
from transformer_xl.train.metrics import read_metrics
from transformer_xl.train.state import local

CPU = torch.device("cpu")
EXACT = {"dropout": 0.0, "attn_dropout": 0.0}
# With an eps this large, the direction of an update does not hang on the rounding of a gradient
# that is all but zero.
SETTINGS = {"eps": 1e-3, "accumulate": 1, "log_every": 1}
AVERAGE = {"average": "ema", "average_decay": 0.5, "reset_memory": 0.3}
TAIL = {"average": "tail", "average_start": 0.5}
SGD = {"optimizer": "sgd", "momentum": 0.9, "lr": 0.1, "eps": 1e-8}
PROMPTS = {"log_every": 4, "steps": 40}
FSDP = {"parallel": "fsdp"}
# Settings of the training, of the model, of the data.
SECTIONS = {
    "ddp in parts, average": ({"accumulate": 2, **AVERAGE},),
    "ddp, lamb, adaptive": (
        {"optimizer": "lamb"},
        {"cutoffs": (3, 9), "div_val": 2, "d_embed": 16},
    ),
    "fsdp in parts, muon, average": (
        {**FSDP, "optimizer": "muon", "accumulate": 2, **TAIL},
        {"norm_first": True, "activation": "swiglu"},
    ),
    "fsdp, bfloat16, computed again": ({**FSDP, "precision": "bfloat16", "recompute": True},),
    "fsdp, sgd": ({**FSDP, **SGD},),
    "ddp, random memory lengths": ({"random_mem_len": 2},),
    # In some steps one process has no completion, in some none has one.
    "ddp, completions": (PROMPTS, {}, {"reset_at": "\n", "completion_at": "."}),
    "fsdp, resets, lengths": ({**FSDP, "random_segment_len": True}, {}, {"reset_at": "\n"}),
}
VARIANTS = {
    name: {
        "train": {**SETTINGS, **settings},
        "model": {**EXACT, **(others[0] if others else {})},
        "data": others[1] if others[1:] else {},
    }
    for name, (settings, *others) in SECTIONS.items()
}
SWITCHED = {"model": EXACT, "train": {**SETTINGS, "optimizer": "muon", "save_every": 0}}


def losses(folder):
    records = read_metrics(folder / "metrics.jsonl")
    return {(r["kind"], r["step"]): r["bits_per_token"] for r in records if "bits_per_token" in r}


def newest(folder):
    return max((folder / "checkpoints").iterdir())


def stop_at(step, told):
    """Let the next training be interrupted; return what undoes it."""
    before = loop.train_step

    def train_step(config, state, network):
        found = before(config, state, network)
        if state.step == step and state.world.rank in told:
            signal.raise_signal(signal.SIGTERM)
        return found

    loop.train_step = train_step
    return lambda: setattr(loop, "train_step", before)


def part(config, folder, step, told=range(4)):
    undo = stop_at(step, told)
    try:
        train(config, folder, quiet=True)
    except (Interrupted, RuntimeError) as stopped:
        return str(stopped)
    finally:
        undo()
    return "not stopped"


@pytest.fixture
def found(toy_recipe, tmp_path_factory):
    """Let two processes do everything, once for all tests."""
    folder = tmp_path_factory.getbasetemp() / "two-processes"
    if not (folder / "found-0.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name in VARIANTS:
            (folder / f"{name}.toml").write_text(toy_recipe(**VARIANTS[name]).to_toml())
        switched = toy_recipe(**SWITCHED)
        (folder / "switched").write_text(switched.to_toml())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "finish", lambda *about: {})
            for name in VARIANTS:
                config = load_recipe(folder / f"{name}.toml")
                train(config, folder / "alone" / name, quiet=True)
            train(switched, folder / "alone" / "switched", quiet=True)
            assert "step 4" in part(switched, folder / "switched-run", 4)
        let(2, folder, "everything")
        let(4, folder, "a part")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "finish", lambda *about: {})
            train(switched, folder / "switched-run", quiet=True)
    return folder


def let(processes, folder, what):
    """Start processes with this file as their program."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), __file__, str(folder), what]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TXL_TRACEBACK": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", VARIANTS)
def test_two_processes_have_the_losses_of_one(found, name):
    alone, together = losses(found / "alone" / name), losses(found / "two" / name)
    assert alone.keys() == together.keys()
    # Gradients are summed up in another order; weights in bfloat16 are rounded as a whole.
    bound = 2e-2 if "bfloat16" in name else 1e-5
    assert max(abs(alone[key] - together[key]) for key in alone) < bound
    for kind in ("best", "last"):
        weights = [
            (found / where / name / "model" / kind / "config.json").read_text()
            for where in ("alone", "two")
        ]
        assert weights[0] == weights[1]
    one, other = (read_whole(newest(found / where / name), "model.") for where in ("alone", "two"))
    torch.testing.assert_close(one, other, rtol=1e-3, atol=bound * 10)
    seconds = [read_about(newest(found / where / name))["seconds"] for where in ("alone", "two")]
    assert min(seconds) > 0


@pytest.mark.slow
def test_a_run_goes_on_with_any_number_of_processes(found):
    alone, switched = losses(found / "alone" / "switched"), losses(found / "switched-run")
    assert alone.keys() == switched.keys()
    # 1, 2 (sharded), 4 processes and 1.
    assert max(abs(alone[key] - switched[key]) for key in alone) < 1e-5
    about = json.loads((found / "found-0.json").read_text())
    # All hear of the signal one step later; who was not told itself is to be started again.
    stopped = "stopped at step 7 and saved; the same command resumes from there"
    assert about["stopped"] == f"another process of this run was asked to end; {stopped}"
    assert json.loads((found / "found-1.json").read_text())["stopped"] == stopped
    assert (found / "switched-run" / "checkpoints" / "step_00000010").exists()


@pytest.mark.slow
def test_each_process_has_its_streams_of_a_memory_bit_for_bit(found):
    for rank in range(2):
        about = json.loads((found / f"found-{rank}.json").read_text())
        assert about["equal"] == {"mems.0": True, "mems.1": True}
        assert about["rows"] == [2 * rank, 2 * rank + 1]


@pytest.mark.slow
def test_what_processes_say_to_each_other(found):
    for rank in range(2):
        about = json.loads((found / f"found-{rank}.json").read_text())
        assert about["by first"] == 0
        assert about["error"] == "only the first"
        # The first process has its own error, the others as much of it as can be sent.
        assert about["as they are"] == (
            [["PairError", "a and b"], ["LockError", "a lock"]]
            if rank == 0
            else [["RuntimeError", "PairError: a and b"], ["RuntimeError", "LockError: a lock"]]
        )
        assert about["mean"] == [0.5, 5.0]
        assert about["gathered"] == ["a", "b"]
        assert about["before"] == [[0.0], [1.0], [11.0]]
        assert about["drawn"] == [rank == 0, True]


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_others_within_the_time_limit(found):
    about = json.loads((found / "found-0.json").read_text())
    assert "lost another one, which stopped or did not answer" in about["stalled"]
    assert 2 < about["waited"] < 20


def test_streams_that_cannot_be_divided_are_an_error():
    with pytest.raises(ValueError, match="batch_size=6 streams cannot be divided evenly over 4"):
        World(rank=1, size=4).rows(6)
    assert World(rank=1, size=3).rows(6) == range(2, 4)


def test_one_process_talks_to_itself():
    world = World()
    assert world.is_first
    assert world.by_first(lambda: 3) == 3
    assert world.mean([1.5]) == [1.5]
    assert world.gather("x") == ["x"]
    assert world.largest_before(1.0, 2.0) == [1.0, 2.0]
    with World.join(CPU, 1.0) as found:
        assert found.size == 1


class PairError(Exception):
    """It can be written by pickle, and not be read."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


class LockError(Exception):
    """It cannot be written by pickle."""

    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()


def throw(error):
    raise error


def main(folder, what):
    """What each of the two processes does."""
    loop.finish = lambda *about: {}
    if what == "a part":
        part(load_recipe(folder / "switched"), folder / "switched-run", 9)
        return
    rank = int(os.environ["RANK"])
    about = {}
    for name in VARIANTS:
        train(load_recipe(folder / f"{name}.toml"), folder / "two" / name, quiet=True)

    switched = load_recipe(folder / "switched")
    sharded = replace(switched, train=replace(switched.train, parallel="fsdp"))
    about["stopped"] = part(sharded, folder / "switched-run", 6, told=[1])
    config = fit_to_corpus(switched, corpus := prepare(switched.data))
    with World.join(CPU, 1.0) as world:
        state = new_state(config, corpus, CPU, world)
        checkpoint = newest(folder / "switched-run")
        state.load(checkpoint)
        about["rows"] = list(rows := world.rows(config.train.batch_size))
        own = {name: local(x) for name, x in state.tensors().items() if "mems" in name}
        whole = read_whole(checkpoint, "")
        about["equal"] = {
            name: torch.equal(x, whole[name][rows.start : rows.stop]) for name, x in own.items()
        }
        world.wait()
    with World.join(CPU, 1.0) as world:
        about["by first"] = world.by_first(lambda: world.rank)
        try:
            world.by_first(lambda: {}["only the first"])
        except KeyError as error:
            about["error"] = error.args[0]
        about["as they are"] = []
        for error in (PairError("a", "b"), LockError("a lock")):
            try:
                world.by_first(partial(throw, error))
            except Exception as raised:  # noqa: BLE001
                about["as they are"].append([type(raised).__name__, str(raised)])
        about["mean"] = world.mean([float(rank), 5.0])
        about["gathered"] = world.gather("ab"[rank])
        about["before"] = [world.largest_before(10.0 * n + rank) for n in range(3)]
        torch.manual_seed(5)
        alone = torch.rand(3)
        torch.manual_seed(5)
        world.seed_apart()
        drawn = world.gather(torch.rand(3).tolist())
        about["drawn"] = [drawn[rank] == alone.tolist(), drawn[0] != drawn[1]]

    # The second one stays away; the first must not wait for ever.
    began = time.perf_counter()
    try:
        with World.join(CPU, 0.05) as world:
            if World.is_first_here():
                world.mean([1.0])
            else:
                time.sleep(5)
    except Stalled as error:
        about["stalled"] = str(error)
    about["waited"] = time.perf_counter() - began
    (folder / f"found-{rank}.json").write_text(json.dumps(about))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
