"""Compare the memory that `txl estimate` computes with that of real training steps.

    python benchmarks/estimating.py --json benchmarks/results/estimating_cpu_epyc_202611.json
    python benchmarks/estimating.py --cases plain muon       # some of them, and print

Each case is a small model that makes real steps of training on the CPU, on random tokens with a
full memory. Two processes measure it: one sums the allocations and frees of PyTorch's allocator
during the last of three steps (`torch.profiler`: every tensor and nothing else), the other reads
the growth of the peak resident set (VmHWM) in three steps, which includes workspaces of libraries
and fragmentation. `benchmarks/scale_tables.py` puts the result into docs/scale.md.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from result_file import write_result_file

sys.path.insert(0, str(Path(__file__).parent))
from turns import circumstances

from transformer_xl.apps.bench import training
from transformer_xl.apps.estimate import Plan, count_weights, moments, peak
from transformer_xl.config import Config, DataConfig, ModelConfig, TrainConfig
from transformer_xl.train.optim import new_average

CPU = torch.device("cpu")
STEPS = 3
MARK = 1_234_567
"""Size in bytes of a tensor that marks the beginning of the last step among all allocations."""


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    model: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> Config:
        """Return it as a recipe."""
        model = {"vocab_size": 1000, "n_layer": 6, "n_head": 8, "d_model": 256, "d_inner": 1024}
        model |= {"mem_len": 128, "dropout": 0.0}
        train = {"batch_size": 16, "segment_len": 128, "precision": "float32"}
        return Config(
            model=ModelConfig(**(model | dict(self.model))),
            data=DataConfig(),
            train=TrainConfig(**(train | dict(self.train))),
        )


CASES = {
    "plain": Case(),
    "twice the layers": Case({"n_layer": 12}),
    "twice the width": Case({"d_model": 512, "d_inner": 2048}),
    "twice the streams": Case(train={"batch_size": 32}),
    "twice the segment": Case({"mem_len": 256}, {"segment_len": 256}),
    "eight times the memory": Case({"mem_len": 1024}, {"batch_size": 8}),
    "dropout": Case({"dropout": 0.1, "attn_dropout": 0.1}),
    "pre-norm": Case({"norm_first": True, "final_norm": True}),
    "SwiGLU": Case({"activation": "swiglu", "dropout": 0.1}),
    "gates": Case({"gate": "gru", "norm_first": True}),
    "memory and segment differ": Case({"mem_len": 192}, {"segment_len": 96}),
    "four parts": Case(train={"batch_size": 64, "accumulate": 4}),
    "computed again": Case(train={"recompute": True}),
    "Muon": Case({"d_model": 512, "d_inner": 2048}, {"batch_size": 4, "optimizer": "muon"}),
    "LAMB and an average": Case(
        {"d_model": 512, "d_inner": 2048},
        {"batch_size": 4, "optimizer": "lamb", "average": "ema"},
    ),
    "60,000 words": Case({"n_layer": 2, "vocab_size": 60_000}, {"batch_size": 4}),
    "60,000 words, not tied": Case(
        {"n_layer": 2, "vocab_size": 60_000, "tie_embeddings": False}, {"batch_size": 4}
    ),
    "60,000 words, clusters": Case(
        {"n_layer": 2, "vocab_size": 60_000, "cutoffs": (5000, 20_000)}, {"batch_size": 4}
    ),
    "60,000 words, narrower": Case(
        {"n_layer": 2, "vocab_size": 60_000, "cutoffs": (5000, 20_000), "div_val": 2},
        {"batch_size": 4},
    ),
    "bfloat16": Case({"n_layer": 3}, {"batch_size": 32, "precision": "bfloat16"}),
    "bfloat16, pre-norm": Case(
        {"n_layer": 3, "norm_first": True}, {"batch_size": 32, "precision": "bfloat16"}
    ),
}


def plan_of(config: Config) -> Plan:
    """Return the plan of one process on a processor."""
    precision = config.train.precision
    assert precision != "auto"
    return Plan(config=config, precision=precision, device="cpu")


def prepare(config: Config) -> Callable[[], object]:
    """Set up the training; return the function that makes a step."""
    state, step = training(config, CPU)
    state.model.recompute = config.train.recompute
    state.average = new_average(state.model, config.train)
    return step


def allocated(config: Config) -> int:
    """Return the peak of allocated tensors in the last step, in bytes."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step = prepare(config)
        for _ in range(STEPS - 1):
            step()
        torch.empty(MARK, dtype=torch.uint8)
        step()
    # torch has no public way to a list of what was allocated.
    events = profiled.profiler.kineto_results.events()  # pyright: ignore
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    last = changes.index(MARK)
    total = most = sum(changes[:last])
    for change in changes[last + 2 :]:
        total += change
        most = max(most, total)
    return most


def resident(config: Config) -> int:
    """Return the growth of the process's peak resident set, in bytes."""
    from transformer_xl.config.device import keep_freed_memory

    keep_freed_memory()
    # A small step first, which loads the libraries.
    prepare(Case({"n_layer": 1, "d_model": 64, "d_inner": 64}).config())()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step = prepare(config)
    for _ in range(STEPS):
        step()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


MEASURES = {"allocated": allocated, "resident": resident}


def measure(names: list[str]) -> dict[str, Any]:
    """Measure cases, each in its own processes."""
    rows = []
    for name in names:
        config = CASES[name].config()
        plan = plan_of(config)
        moment, most = peak(plan)
        row = {
            "case": name,
            "model": dict(CASES[name].model),
            "train": dict(CASES[name].train),
            "parameters": count_weights(config.model).total,
            "moment": moment,
            "estimated": most.total,
            "moments": {each: x.total for each, x in moments(plan).items()},
            "parts": asdict(most),
        }
        for way in MEASURES:
            command = [sys.executable, __file__, "--worker", way, name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            row[way] = int(done.stdout.splitlines()[-1])
        rows.append(row)
        mb = {key: round(row[key] / 1e6) for key in ("estimated", *MEASURES)}
        print(name, mb, flush=True)
    return circumstances() | {"steps": STEPS, "rows": rows}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=2, metavar=("WAY", "CASE"))
    arguments = parser.parse_args()
    if arguments.worker:
        way, case = arguments.worker
        print(MEASURES[way](CASES[case].config()))
        return
    result = measure(arguments.cases)
    if arguments.json:
        write_result_file(arguments.json, result)


if __name__ == "__main__":
    main()
