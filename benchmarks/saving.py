"""What a checkpoint costs a training that goes on while it is written.

    python benchmarks/saving.py --json saving.json

A model of 41 M weights (the paper's 12 layers for enwik8) makes steps of few tokens. Now and then a
checkpoint is begun, as a run begins it: weights, what the optimizer knows of them, the memory, and
the model folder `last`. What the steps from there to its end take beyond what as many steps usually
take is what it costs; of that, the training stands still while copies are made. The share is that
of one save a minute.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from result_file import write_result_file
from torch import Tensor
from turns import circumstances

from transformer_xl.apps.bench.speed import training, with_vocabulary
from transformer_xl.config.device import keep_freed_memory, pick_device
from transformer_xl.config.distributed import World
from transformer_xl.config.recipes import load_recipe
from transformer_xl.model.pretrained import write_model
from transformer_xl.train import TrainState
from transformer_xl.train.checkpoint.checkpoints import Checkpoints, read_whole

MINUTE = 60.0


def measure(
    state: TrainState, step: Callable[[], Tensor], checkpoints: Checkpoints, usual_steps: int
) -> dict[str, float]:
    """Return the seconds of one save: standing still, being written, costing in all."""
    usual = [_seconds(step) for _ in range(usual_steps)]
    pace = statistics.mean(usual)
    began, steps = time.perf_counter(), 0
    # As a run does, with the model folder that is written of what the checkpoint holds.
    last = checkpoints.folder.parent / "last"
    checkpoints.save(
        state.step,
        state.tensors(),
        state.about(),
        keep=1,
        before=lambda place: write_model(state.model.config, read_whole(place, "model."), last),
    )
    stood = time.perf_counter() - began
    assert checkpoints._writing is not None
    while not checkpoints._writing[1].done():
        step()
        steps += 1
    checkpoints.wait()
    lasted = time.perf_counter() - began
    return {
        "step": pace,
        "stood_still": stood,
        "written_in": lasted,
        "cost": lasted - steps * pace,
        "share_at_one_a_minute": (lasted - steps * pace) / MINUTE,
    }


def _seconds(step: Callable[[], Tensor]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="paper-enwik8-base")
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--segment_len", type=int, default=64)
    parser.add_argument("--mem_len", type=int, default=512)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--usual_steps", type=int, default=12, help="between two saves")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    keep_freed_memory()
    config = with_vocabulary(load_recipe(arguments.recipe))
    lengths = {"batch_size": arguments.batch_size, "segment_len": arguments.segment_len}
    config = replace(
        config,
        train=replace(config.train, **lengths, compile=False),
        model=replace(config.model, mem_len=arguments.mem_len),
    )
    state, step = training(config, pick_device())
    for _ in range(3):
        step()
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpoints(Path(folder) / "checkpoints", World()) as checkpoints,
    ):
        for _ in range(arguments.saves):
            rows.append(measure(state, step, checkpoints, arguments.usual_steps))
            print("  ".join(f"{name} {value:.4f}" for name, value in rows[-1].items()), flush=True)
        (written,) = (Path(folder) / "checkpoints").iterdir()
        n_bytes = sum(path.stat().st_size for path in written.iterdir())
    found = {
        **circumstances(),
        "parameters": sum(p.numel() for p in state.model.parameters()),
        "checkpoint_mb": n_bytes / 1e6,
        "median": {name: statistics.median(row[name] for row in rows) for name in rows[0]},
        "rows": rows,
    }
    print(json.dumps(found["median"] | {"checkpoint_mb": found["checkpoint_mb"]}))
    if arguments.json:
        write_result_file(arguments.json, found)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
