"""Which kernels a step of a model launches on a GPU, and how long each takes.

    python benchmarks/gpu/kernels.py training --shape enwik8 --compile
    python benchmarks/gpu/kernels.py generation --shape enwik8 --batch 64 --mem_len 2048
    python benchmarks/gpu/kernels.py training --shape enwik8 --way gpt --compile

Prints the time of a step by the clock and by the GPU, and the kernels that take most. Where both
are far apart, launches take the time. Needs the ``PYTHONPATH`` that queue.sh sets.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from peers import WAYS, build
from result_file import write_result_file
from shapes import SHAPES, Job
from turns import circumstances


def profiled(step: Callable[[], object], steps: int) -> dict[str, Any]:
    """Make steps; return the milliseconds of one, and those of its kernels."""
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.self_device_time_total]
    events.sort(key=lambda event: -event.self_device_time_total)
    kernels = [
        {
            "kernel": event.key,
            "launches": event.count / steps,
            "ms": event.self_device_time_total / steps / 1e3,
        }
        for event in events
    ]
    on_gpu = sum(kernel["ms"] for kernel in kernels)
    return {"ms": 1e3 * seconds, "ms_on_gpu": on_gpu, "kernels": kernels}


def main() -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("work", choices=("training", "evaluation", "generation"))
    add("--shape", choices=SHAPES, default="enwik8")
    add("--way", choices=WAYS, default="ours")
    add("--dtype", help="bfloat16 in training, else bfloat16_weights")
    for name in ("length", "mem_len", "batch"):
        add(f"--{name}", type=int, help="if not that of the shape")
    add("--compile", action="store_true", help="with torch.compile")
    add("--steps", type=int, default=5, help="of which the mean is taken")
    add("--show", type=int, default=20, help="how many kernels are printed and written")
    add("--json", type=Path, help="also write them to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this PyTorch finds no GPU")
    given = {name: getattr(arguments, name) for name in ("length", "mem_len", "batch")}
    if arguments.work == "generation":
        given["length"] = 1
    shape = replace(SHAPES[arguments.shape], **{k: x for k, x in given.items() if x is not None})
    is_training = arguments.work == "training"
    dtype = arguments.dtype or ("bfloat16" if is_training else "bfloat16_weights")
    job = Job(arguments.work, shape, dtype, device="cuda", compiled=arguments.compile)
    step = import_module(arguments.work).prepare(build(arguments.way, job), job)
    found = profiled(step, arguments.steps)
    n_launches = sum(kernel["launches"] for kernel in found["kernels"])
    print(f"{found['ms']:.2f} ms a step, {found['ms_on_gpu']:.2f} ms of {n_launches:.0f} kernels")
    for kernel in found["kernels"][: arguments.show]:
        print(f"{kernel['ms']:9.3f} ms {kernel['launches']:6.0f} x {kernel['kernel'][:100]}")
    if arguments.json:
        shown, rest = found["kernels"][: arguments.show], found["kernels"][arguments.show :]
        found["kernels"] = [kernel | {"kernel": kernel["kernel"][:60]} for kernel in shown]
        found["ms_of_others"] = sum(kernel["ms"] for kernel in rest)
        report = circumstances("cuda") | {"job": json.loads(job.to_json()), **found}
        write_result_file(arguments.json, report)


if __name__ == "__main__":
    main()
