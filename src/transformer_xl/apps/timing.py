"""Time and memory of a step, and what a machine can do at most."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_xl.ops import emulates, linear

WARM_UP = 2
"""Steps before the measured ones."""
CEILING_WIDTH = {"cpu": 2048, "cuda": 8192}
"""Width of the square matrices whose product measures the peak rate."""


def timed(
    step: Callable[[], object], steps: int, device: torch.device, warm_up: int = WARM_UP
) -> dict[str, Any]:
    """Return the median and the range of the seconds of a step."""
    seconds = []
    for _ in range(warm_up + steps):
        began = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return median_and_range(seconds[warm_up:])


def median_and_range(seconds: list[float]) -> dict[str, float | list[float]]:
    """Return the median of measured seconds, and the least and the most."""
    return {"seconds": statistics.median(seconds), "seconds_range": [min(seconds), max(seconds)]}


def ceiling(dtype: str, device: torch.device) -> float:
    """Measure the rate of a large matrix product in GFLOP/s, with the fastest library."""
    width = CEILING_WIDTH[device.type]
    x = torch.randn(width, width, device=device, dtype=getattr(torch, dtype))
    ways: list[Callable[[], Tensor]] = [lambda: linear(x, x, None)]
    is_x86 = torch.cpu.get_capabilities().get("architecture") == "x86_64"
    has_onednn = is_x86 and torch.backends.mkldnn.is_available()
    if device.type == "cpu" and has_onednn and not emulates(x.dtype, device.type):
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(x, x, None, "none", [], ""))
    return 2 * width**3 / 1e9 / min(timed(way, 5, device)["seconds"] for way in ways)
