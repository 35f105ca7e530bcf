"""Time and peak memory of a training step with each way to compute relative attention.

    python benchmarks/training.py                      # the 12-layer shape, float32 and bfloat16
    python benchmarks/training.py --shape small --rounds 9

A step is forward, backward and AdamW, with a full memory. Each way runs in a process of its own
(so that its peak memory is its own); the processes take turns, one step at a time, and ratios are
taken turn by turn, so that a machine that slows down slows all of them. The ceiling is the rate of
one large matrix product, measured in the same run.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from turns import circumstances, take_turns, work

from transformer_xl.config import ModelConfig
from transformer_xl.device import autocast
from transformer_xl.nn import TransformerXL
from transformer_xl.ops import Backend, use_backend


@dataclass(frozen=True)
class Shape:
    """What is trained."""

    n_layer: int
    d_model: int
    n_head: int
    d_inner: int
    length: int
    batch: int
    vocab: int = 205


SHAPES = {
    "base": Shape(12, 512, 8, 2048, 512, 2),
    "small": Shape(6, 256, 8, 1024, 128, 16),
    "demo": Shape(4, 192, 4, 768, 128, 16, 4096),
}
DTYPES = ("float32", "bfloat16")


def prepare(shape: Shape, backend: Backend, dtype: str) -> Callable[[], object]:
    """Build a model and its optimizer; return a function that makes a training step."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=shape.vocab,
        n_layer=shape.n_layer,
        d_model=shape.d_model,
        n_head=shape.n_head,
        d_inner=shape.d_inner,
        mem_len=shape.length,
        dropout=0.0,
    )
    model = TransformerXL(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1))
    mems = None

    def step() -> None:
        nonlocal mems
        with use_backend(backend), autocast(dtype, torch.device("cpu")):
            out = model(tokens[:, :-1], mems, tokens[:, 1:])
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mems = out.mems

    return step


def ceiling(dtype: str) -> float:
    """Return the rate of a large matrix product in GFLOP/s."""
    x = torch.randn(2048, 2048, dtype=getattr(torch, dtype))
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        x @ x
        seconds.append(time.perf_counter() - began)
    return 2 * 2048**3 / statistics.median(seconds) / 1e9


def measure(shape: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Let the ways take turns; return medians, ratios and peaks."""
    ways = {backend: [shape, backend, dtype] for backend in ("reference", "skew")}
    # The first step fills the memory, the second is the first of the full size.
    measured = take_turns(__file__, ways, "skew", rounds=rounds, warm=2)
    return {"dtype": dtype, **measured, "ceiling_gflops": ceiling(dtype)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        shape, backend, dtype = arguments.worker
        work(prepare(SHAPES[shape], backend, dtype))
        return
    rows = [measure(arguments.shape, dtype, arguments.rounds) for dtype in arguments.dtypes]
    report = circumstances() | {
        "shape": {"name": arguments.shape, **asdict(SHAPES[arguments.shape])},
        "rows": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{report['processor']}, {report['threads']} threads, torch {report['torch']}")
    print("| dtype | reference | copy-free | ratio (range) | peak memory | product ceiling |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        seconds, peak = row["seconds"], row["peak_mb"]
        ratio, (low, high) = row["ratio"]["reference"], row["ratio_range"]["reference"]
        print(
            f"| {row['dtype']} | {seconds['reference']:.3f} s | {seconds['skew']:.3f} s "
            f"| {ratio:.2f} ({low:.2f} to {high:.2f}) "
            f"| {peak['reference']:.0f} -> {peak['skew']:.0f} MB "
            f"| {row['ceiling_gflops']:.0f} GFLOP/s |"
        )


if __name__ == "__main__":
    main()
