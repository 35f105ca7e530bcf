"""Find how the kernel of a decoding step should divide its work on this GPU.

    python benchmarks/gpu/tune_step.py
    python benchmarks/gpu/tune_step.py --shapes 64,2048,8 --width 64 --json step.json

A shape is streams, remembered, heads. The kernel attends from one token of each stream to a full
ring in bfloat16. Each division has to compute what the present one computes, and is then timed on
the device (median), with the rings of several layers in turn, so that none is in a cache. With
``product`` the position term of all streams is one product, without it each stream reads the
positions (``SHARED_FROM``). The fastest belongs into ``STEP_BLOCKS`` of ops/triton.py.
"""

import argparse
import itertools
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from result_file import write_result_file
from turns import circumstances

from transformer_xl.ops import triton as kernels

SLOTS = ((32, 1), (32, 2), (64, 2), (64, 4), (128, 4), (256, 8))
BOTH = False, True
CACHE = 1 << 28
"""Bytes of all rings, several times what a cache holds."""


class Shape(NamedTuple):
    """What is attended to."""

    streams: int
    remembered: int
    heads: int

    @classmethod
    def of(cls, text: str) -> "Shape":
        """Parse a word of the command line."""
        return cls(*map(int, text.split(",")))


class Step:
    """A token of each stream, and the rings of several layers."""

    def __init__(self, shape: Shape, K: int, device: str = "cuda", cache: int = CACHE) -> None:
        B, M, H = shape

        def draw(*size: int) -> Tensor:
            return torch.randn(size, dtype=torch.bfloat16, device=device)

        layers = max(1, math.ceil(cache / (4 * B * M * H * K)))
        self.rings = [(draw(H, B, M, K), draw(H, B, M, K)) for _ in range(layers)]
        self.bytes = 4 * B * M * H * K
        self._qkv, self._others = draw(3, B, 1, H, K), (draw(M, H, K), draw(H, K), draw(H, K))
        self._at = {
            "newest": torch.tensor([M // 3], device=device),
            "n_seen": torch.full((B,), M, device=device),
        }

    def __call__(self) -> list[Tensor]:
        """Attend in each layer."""
        return [
            kernels.attend_step(*self._qkv, *ring, *self._others, **self._at) for ring in self.rings
        ]


def measured(step: Step, expected: list[Tensor]) -> float | None:
    """Return the seconds of a layer; None if it fails or computes something else."""
    try:
        found = step()
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
    except Exception as error:  # noqa: BLE001  (too many registers, and what else there is)
        print(f"    {type(error).__name__}: {str(error)[:80]}")
        return None
    # Captured, as decoding does: a launch takes longer than a layer.
    return triton.testing.do_bench_cudagraph(step, rep=100, return_mode="median") / 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--width", type=int, default=64, help="of the heads")
    shapes = [Shape(64, 2048, 8), Shape(1, 640, 8)]
    parser.add_argument("--shapes", nargs="+", type=Shape.of, default=shapes)
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    shared = kernels.SHARED_FROM
    for shape in arguments.shapes:
        step = Step(shape, arguments.width)
        expected = step()
        which = "few" if shape.streams * shape.heads <= 128 else "many"
        print(f"{shape}: {which}, {len(step.rings)} layers of {step.bytes / 1e6:.0f} MB")
        standard = kernels.STEP_BLOCKS[which]
        for (slots, warps), is_ahead, product in itertools.product(SLOTS, BOTH, BOTH):
            kernels.STEP_BLOCKS[which] = kernels.StepBlocks(slots, warps, is_ahead)
            kernels.SHARED_FROM = 1 if product else shape.streams + 1
            if (seconds := measured(step, expected)) is None:
                continue
            seconds /= len(step.rings)
            about = {"slots": slots, "warps": warps, "is_ahead": is_ahead, "product": product}
            is_present = kernels.STEP_BLOCKS[which] == standard
            is_present &= product == (shape.streams >= shared)
            rows.append({"shape": shape, **about, "us": 1e6 * seconds, "is_present": is_present})
            print(
                f"  {about}: {1e6 * seconds:.1f} us, {step.bytes / seconds / 1e12:.2f} TB/s"
                f"{' (present)' if is_present else ''}",
                flush=True,
            )
            if arguments.json:
                write_result_file(arguments.json, circumstances("cuda") | {"rows": rows})
        kernels.STEP_BLOCKS[which], kernels.SHARED_FROM = standard, shared


if __name__ == "__main__":
    main()
