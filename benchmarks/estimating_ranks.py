"""Compare `txl estimate` with training by two processes: memory and bytes sent.

    python benchmarks/estimating_ranks.py --json result.json
    python benchmarks/estimating_ranks.py --cases Muon

The cases are those of `benchmarks/estimating.py`, with DDP and with FSDP, on the CPU. Tensors are
counted as there, in the first process. Bytes sent are read from the counter of the loopback device
before and after a step, so nothing else may use it. gloo may implement a reduce-scatter by an
all-reduce, so FSDP can send as much as DDP.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from result_file import write_result_file

sys.path.insert(0, str(Path(__file__).parent))
from estimating import CASES, CPU, MARK, STEPS
from turns import circumstances

from transformer_xl.apps.bench.speed import full_memory
from transformer_xl.apps.estimate import Plan, peak, sent_bytes
from transformer_xl.config.distributed import World, joined
from transformer_xl.data import Segments
from transformer_xl.model import build_model
from transformer_xl.train import Network, TrainState, train_step
from transformer_xl.train.optim import Optimizer
from transformer_xl.train.sharding import shard

RANKS = 2
NAMES = ("plain", "Muon", "60,000 words")


def plan_of(case: str, parallel: Any) -> Plan:
    """Return the plan of a case, divided over the processes."""
    config = CASES[case].config()
    train = replace(config.train, parallel=parallel)
    return Plan(
        config=replace(config, train=train),
        ranks=RANKS,
        parallel=parallel,
        precision="float32",
        device="cpu",
    )


def work(plan: Plan) -> None:
    """Train a few steps; print the peak of allocated tensors and the bytes sent in the last one."""
    from torch.profiler import ProfilerActivity, profile

    with (
        joined(CPU, 5) as world,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        state, network = _initial_state(plan, world)
        for _ in range(STEPS - 1):
            train_step(plan.config, state, network)
        dist.barrier()
        before = _loopback_bytes()
        dist.barrier()
        torch.empty(MARK, dtype=torch.uint8)
        train_step(plan.config, state, network)
        dist.barrier()
        sent = (_loopback_bytes() - before) // RANKS
    # torch has no public way to a list of what was allocated.
    events = profiled.profiler.kineto_results.events()  # pyright: ignore
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    last = changes.index(MARK)
    total = most = sum(changes[:last])
    for change in changes[last + 2 :]:
        total += change
        most = max(most, total)
    if world.is_first:
        print(json.dumps({"allocated": most, "sent": sent}))


def _initial_state(plan: Plan, world: World) -> tuple[TrainState, Network]:
    config, settings = plan.config, plan.config.train
    torch.manual_seed(settings.seed)
    model = build_model(config.model).train()
    shard(model, settings, world, CPU)
    n_tokens = 8 * settings.batch_size * settings.segment_len + 1
    tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=n_tokens)
    rows = world.rows(settings.batch_size)
    state = TrainState(
        model=model,
        optimizer=Optimizer(model, settings),
        segments=Segments(tokens, settings.batch_size, settings.segment_len, 0, rows),
        mems=[full_memory(model, plan.B, plan.M) for _ in range(settings.accumulate)],
        total_steps=settings.steps,
        corpus={},
        world=world,
    )
    return state, Network(model, settings, world)


def _loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == "lo:")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=2, metavar=("PARALLEL", "CASE"))
    arguments = parser.parse_args()
    if arguments.worker:
        parallel, case = arguments.worker
        work(plan_of(case, parallel))
        return
    rows = []
    for case in arguments.cases:
        for parallel in ("ddp", "fsdp"):
            plan = plan_of(case, parallel)
            words = ["--standalone", f"--nproc-per-node={RANKS}", __file__, "--worker"]
            command = [sys.executable, "-m", "torch.distributed.run", *words, parallel, case]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=True, env=environment
            )
            moment, most = peak(plan)
            row = {
                "case": case,
                "parallel": parallel,
                "moment": moment,
                "estimated": most.total,
                "estimated_sent": sum(sent_bytes(plan).values()),
                **json.loads(done.stdout.splitlines()[-1]),
            }
            rows.append(row)
            print(row, flush=True)
    if arguments.json:
        result = circumstances() | {"ranks": RANKS, "steps": STEPS, "rows": rows}
        write_result_file(arguments.json, result)


if __name__ == "__main__":
    main()
