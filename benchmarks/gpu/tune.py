"""Find how the kernels should divide their work on this GPU; prints the best as code to paste.

    python benchmarks/gpu/tune.py                                    # bfloat16, heads of width 64
    python benchmarks/gpu/tune.py --width 128 --kernels forward queries
    python benchmarks/gpu/tune.py --shapes 22,512,512,8 1,128,3800,8 --json tuned.json

A shape is streams, queries, remembered, heads. Every division is compiled first, on all cores of
the processor; those whose instructions alone take half as long again as the best's are left out
(``resources.py`` counts them). The others have to compute what the present one computes; then they
are timed (median, on the device). The best is the one with the lowest geometric mean over the
shapes of its time as a share of the present one's. Paste the lines into ``BLOCKS`` of
ops/triton.py.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from resources import KERNELS, NoGPU, candidates, compile_kernel
from torch import Tensor
from triton.runtime import driver

from transformer_xl.ops import triton as kernels

# Training of the enwik8 model and of NVIDIA's base, and an evaluation with a long memory.
SHAPES = ("22,512,512,8", "64,192,192,8", "4,128,3800,8")
# Products that a kernel needs, each 2 K operations for a pair of query and key that is seen.
PRODUCTS = {"forward": 3, "queries": 5, "keys": 5, "distances": 4}


def precompile(job: tuple[str, kernels.Blocks, str, int, int]) -> float:
    """Compile one division into Triton's cache, in a process without a GPU; return its cycles."""
    kernel, blocks, dtype, K, capability = job
    driver.set_active(NoGPU(capability))
    kernels.BLOCKS[_key(kernel, dtype, K)] = blocks
    try:
        return compile_kernel(kernel, getattr(torch, dtype), K).issue_cycles
    except Exception as error:  # noqa: BLE001  (the compiler fails in many ways)
        print(f"{kernel} {tuple(blocks)}: {type(error).__name__}")
        return math.inf


def launches(shape: str, dtype: str, K: int) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Prepare operands; return a function that launches each kernel and returns what it made."""
    B, T, M, H = map(int, shape.split(","))
    S = M + T
    shapes = [(B, T, H, K), (B, S, H, K), (B, S, H, K), (S, H, K), (H, K), (H, K), (B, T, H, K)]
    *tensors, d_out = (torch.randn(x, dtype=getattr(torch, dtype), device="cuda") for x in shapes)
    operands = (*tensors, None, None, None, S, 0.0)
    out, norms = kernels._attend(*operands)
    _, _, back = kernels._query_gradients(d_out, norms, out, *operands)
    return {
        "forward": lambda: kernels._attend(*operands),
        "queries": lambda: kernels._query_gradients(d_out, norms, out, *operands),
        "keys": lambda: kernels._key_gradients(d_out, norms, back, *operands),
        "distances": lambda: kernels._distance_gradients(d_out, norms, back, *operands),
    }


def tflops(kernel: str, shape: str, K: int, seconds: float) -> float:
    """Return the rate of what has to be computed, pairs that see each other only."""
    B, T, M, H = map(int, shape.split(","))
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
) -> list[dict[str, Any]]:
    """Time the present and other divisions of a kernel's work, until the time is over."""
    key = _key(kernel, arguments.dtype, arguments.width)
    standard = kernels.BLOCKS[key]
    all_launches = {
        shape: launches(shape, arguments.dtype, arguments.width)[kernel]
        for shape in arguments.shapes
    }
    expected = {shape: launch() for shape, launch in all_launches.items()}
    rows = []
    for blocks in [standard, *promising]:
        if time.monotonic() > end:
            print(f"    out of time before {tuple(blocks)}")
            break
        kernels.BLOCKS[key] = blocks
        seconds = {s: measure(launch, expected[s]) for s, launch in all_launches.items()}
        rates = [tflops(kernel, s, arguments.width, x) for s, x in seconds.items()]
        print(f"  {kernel} {tuple(blocks)}: " + ", ".join(f"{rate:.0f}" for rate in rates))
        rows.append({"kernel": kernel, "blocks": tuple(blocks), "seconds": seconds})
    kernels.BLOCKS[key] = standard
    return rows


def share(row: dict[str, Any], standard: dict[str, Any]) -> float:
    """Return the geometric mean of the times as shares of the present ones."""
    ratios = [row["seconds"][shape] / x for shape, x in standard["seconds"].items()]
    return math.prod(ratios) ** (1 / len(ratios))


def _key(kernel: str, dtype: str, K: int) -> tuple[str, int, int]:
    return kernel, getattr(torch, dtype).itemsize, 64 if K <= 64 else 128


def main() -> None:
    """Compile, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--width", type=int, default=64, help="of the heads")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
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
    jobs = [
        (kernel, blocks, arguments.dtype, arguments.width, 10 * major + minor)
        for kernel, blocks in itertools.product(
            arguments.kernels, candidates(getattr(torch, arguments.dtype))
        )
    ]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        cycles = dict(zip([job[:2] for job in jobs], pool.map(precompile, jobs), strict=True))
    print(f"{torch.cuda.get_device_name()}, Triton {triton.__version__}; TFLOP/s at each shape")
    rows, best = [], []
    for number, kernel in enumerate(arguments.kernels):
        # What is left of the time is shared by the kernels that are left.
        left = (end - time.monotonic()) / (len(arguments.kernels) - number)
        of_kernel = {blocks: n for (name, blocks), n in cycles.items() if name == kernel}
        best_first = sorted(of_kernel, key=of_kernel.__getitem__)
        promising = [x for x in best_first if of_kernel[x] <= 1.5 * of_kernel[best_first[0]]]
        measured = tune(kernel, promising, arguments, time.monotonic() + left)
        rows += measured
        chosen = min(measured, key=lambda row: share(row, measured[0]))
        best.append((chosen, share(chosen, measured[0])))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    for row, ratio in best:
        blocks = ", ".join(map(str, row["blocks"]))
        key = ", ".join(map(repr, _key(row["kernel"], arguments.dtype, arguments.width)))
        print(f"    ({key}): Blocks({blocks}),  # {ratio:.2f} of the time before".replace("'", '"'))


if __name__ == "__main__":
    main()
