"""Find how the kernels should divide their work on this GPU; prints the best as code to paste.

    python benchmarks/gpu/tune.py                                    # bfloat16, heads of width 64
    python benchmarks/gpu/tune.py --width 128 --kernels forward
    python benchmarks/gpu/tune.py --shapes 22,512,512,8 1,128,3800,8 --json tuned.json

A shape is streams, queries, remembered, heads. Every division is compiled for all of them first,
on all cores of the processor; those whose instructions alone take half as long again as the best's
are left out (``resources.py`` counts them). The others have to compute what the present one
computes; then they are timed (median, on the device). The best is the one with the lowest geometric
mean over the shapes of its time as a share of the present one's. Paste the lines into ``BLOCKS`` of
ops/triton.py. The file of ``--json`` is written anew after each division.
"""

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from resources import KERNELS, NoGPU, Shape, candidates, compile_kernel
from torch import Tensor
from triton.runtime import driver

from transformer_xl.ops import triton as kernels

# Training of the enwik8 model and of NVIDIA's base, and an evaluation with a long memory.
SHAPES = (Shape(22, 512, 512, 8), Shape(64, 192, 192, 8), Shape(4, 128, 3800, 8))
# Products that the pass needs, each 2 K operations for a pair of query and key that is seen.
PRODUCTS = {"forward": 3, "backward": 6}


class Job(NamedTuple):
    """A division of a kernel's work, and what it is compiled for."""

    kernel: str
    blocks: kernels.Blocks
    dtype: str
    K: int
    shapes: list[Shape]
    capability: int


def precompile(job: Job) -> float:
    """Compile one division into Triton's cache, in a process without a GPU; return its cycles."""
    driver.set_active(NoGPU(job.capability))
    kernels.BLOCKS[_key(job.kernel, job.dtype, job.K)] = job.blocks
    dtype, cycles = getattr(torch, job.dtype), []
    try:
        for shape in job.shapes:
            cycles.append(compile_kernel(job.kernel, dtype, job.K, shape=shape).issue_cycles)
    except Exception as error:  # noqa: BLE001  (the compiler fails in many ways)
        print(f"{job.kernel} {tuple(job.blocks)}: {type(error).__name__}")
        return math.inf
    return max(cycles)


def launches(
    shape: Shape, dtype: str, K: int, device: str = "cuda"
) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Prepare operands; return a function that launches each kernel and returns what it made."""
    B, T, M, H = shape
    S = M + T
    shapes = [(B, H, T, K), (H, B, T, K), (B, S, H, K), (B, S, H, K), (S, H, K), (B, T, H, K)]
    *tensors, d_out = (torch.randn(x, dtype=getattr(torch, dtype), device=device) for x in shapes)
    operands = (*tensors, None, None, None, S, 0.0)
    out, norms = kernels._attend(*operands)
    return {
        "forward": lambda: kernels._attend(*operands),
        "backward": lambda: kernels._gradients_of(d_out, norms, out, *operands),
    }


def tflops(kernel: str, shape: Shape, K: int, seconds: float) -> float:
    """Return the rate of what has to be computed, pairs that see each other only."""
    B, T, M, H = shape
    return 2 * PRODUCTS[kernel] * B * H * K * (T * M + T * (T + 1) / 2) / seconds / 1e12


def measure(launch: Callable[[], tuple[Tensor, ...]], expected: tuple[Tensor, ...]) -> float:
    """Return the median time of a launch in seconds, infinite if it fails or computes wrongly."""
    try:
        found = launch()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  (too much shared memory, and what else there is)
        print(f"    {type(error).__name__}: {str(error)[:80]}")
        return math.inf
    for one, other in zip(found, expected, strict=True):
        if not (one.float() - other.float()).norm() <= 1e-2 * other.float().norm():
            print("    computes something else")
            return math.inf
    return float(triton.testing.do_bench(launch, warmup=10, rep=50, return_mode="median")) / 1e3


def tune(
    kernel: str, promising: list[kernels.Blocks], arguments: argparse.Namespace, end: float
) -> Iterator[dict[str, Any]]:
    """Time the present and other divisions of a kernel's work, until the time is over."""
    key = _key(kernel, arguments.dtype, arguments.width)
    standard = kernels.BLOCKS[key]
    all_launches = {
        shape: launches(shape, arguments.dtype, arguments.width)[kernel]
        for shape in arguments.shapes
    }
    expected = {shape: launch() for shape, launch in all_launches.items()}
    for blocks in [standard, *promising]:
        if time.monotonic() > end:
            print(f"    out of time before {tuple(blocks)}")
            break
        kernels.BLOCKS[key] = blocks
        seconds = [measure(launch, expected[s]) for s, launch in all_launches.items()]
        rates = [
            tflops(kernel, shape, arguments.width, x)
            for shape, x in zip(arguments.shapes, seconds, strict=True)
        ]
        told = ", ".join(f"{rate:.0f}" for rate in rates)
        print(f"  {kernel} {tuple(blocks)}: {told}", flush=True)
        yield {"kernel": kernel, "blocks": tuple(blocks), "seconds": seconds, "tflops": rates}
    kernels.BLOCKS[key] = standard


def share(row: dict[str, Any], standard: dict[str, Any]) -> float:
    """Return the geometric mean of the times as shares of the present ones."""
    ratios = [a / b for a, b in zip(row["seconds"], standard["seconds"], strict=True)]
    return math.prod(ratios) ** (1 / len(ratios))


def _key(kernel: str, dtype: str, K: int) -> tuple[str, int, int]:
    return kernel, getattr(torch, dtype).itemsize, 64 if K <= 64 else 128


def _shape(text: str) -> Shape:
    return Shape(*map(int, text.split(",")))


def main() -> None:
    """Compile, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--width", type=int, default=64, help="of the heads")
    parser.add_argument("--shapes", nargs="+", type=_shape, default=list(SHAPES))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--minutes", type=float, default=8, help="after which no more are tried")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        # The divisions that are tried stand in one table, whatever the GPU.
        kernels.BLOCKS.update(kernels.BEFORE_HOPPER)
        kernels.BEFORE_HOPPER.clear()
    settings = arguments.dtype, arguments.width, arguments.shapes, 10 * major + minor
    divisions = candidates(getattr(torch, arguments.dtype))
    jobs = [
        Job(kernel, blocks, *settings)
        for kernel in arguments.kernels
        for blocks in {kernels.BLOCKS[_key(kernel, *settings[:2])]: 0} | dict.fromkeys(divisions)
    ]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        cycles = dict(zip([job[:2] for job in jobs], pool.map(precompile, jobs), strict=True))
    print(f"{torch.cuda.get_device_name()}, Triton {triton.__version__}; TFLOP/s at each shape")
    rows, best = [], []
    for number, kernel in enumerate(arguments.kernels):
        # What is left of the time is shared by the kernels that are left.
        left = (end - time.monotonic()) / (len(arguments.kernels) - number)
        of_kernel = {blocks: n for (name, blocks), n in cycles.items() if name == kernel}
        best_first = sorted(divisions, key=of_kernel.__getitem__)
        promising = [x for x in best_first if of_kernel[x] <= 1.5 * of_kernel[best_first[0]]]
        measured = []
        for row in tune(kernel, promising, arguments, time.monotonic() + left):
            measured.append(row)
            if arguments.json:
                report = {"shapes": arguments.shapes, "rows": rows + measured}
                arguments.json.write_text(json.dumps(report, indent=2) + "\n")
        rows += measured
        if not measured or not all(map(math.isfinite, measured[0]["seconds"])):
            print(f"    {kernel}: the present division could not be timed")
            continue
        chosen = min(measured, key=lambda row: share(row, measured[0]))
        best.append((chosen, share(chosen, measured[0])))
    for row, ratio in best:
        blocks = ", ".join(map(str, row["blocks"]))
        key = ", ".join(map(repr, _key(row["kernel"], arguments.dtype, arguments.width)))
        print(f"    ({key}): Blocks({blocks}),  # {ratio:.2f} of the time before".replace("'", '"'))


if __name__ == "__main__":
    main()
