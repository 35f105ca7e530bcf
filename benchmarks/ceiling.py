"""What the machine can do at most: multiply large matrices, and read memory."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch

LIMITS = "ceiling", "reading"
"""Names of the processes that measure the machine beside the ways."""


def apart(turns: dict[str, Any], device: str) -> tuple[dict[str, Any], dict[str, float], float]:
    """Take the limits of the machine out of what came of turns.

    Returns:
        What came of the ways, by figure and way; the seconds of ``ceiling`` and ``reading``; and
        the product rate in FLOP/s.
    """
    limits = {name: x for name, x in turns["seconds"].items() if name in LIMITS}
    peak = 2 * _width(device) ** 3 / limits.get("ceiling", math.nan)
    ways = {
        figure: {name: x for name, x in values.items() if name not in LIMITS}
        for figure, values in turns.items()
        if figure != "failed"
    }
    return ways | {"failed": turns["failed"]}, limits, peak


def ratio(row: dict[str, Any], name: str) -> str:
    """Return how many times as long as ours a way takes, with the range over the turns."""
    if name not in row["ratio"]:
        return ""
    low, high = row["ratio_range"][name]
    return f"{row['ratio'][name]:.2f} ({low:.2f} to {high:.2f})"


def products(dtype: torch.dtype, device: str) -> Callable[[], object]:
    """Return a function that multiplies two large matrices.

    On a processor it is the faster one of torch's own product and oneDNN's, which torch uses for
    some precisions only.
    """
    n = _width(device)
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    ways: list[Callable[[], object]] = [lambda: a @ b]
    # oneDNN refuses bfloat16 on processors without AVX-512.
    has_product = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if device == "cpu" and torch.backends.mkldnn.is_available() and has_product:
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))
    with torch.no_grad():
        return min(ways, key=lambda way: _seconds(way, device))


def _width(device: str) -> int:
    return 2048 if device == "cpu" else 8192


def reading(n_bytes: int, device: str) -> Callable[[], object]:
    """Return a function that reads that many bytes once: the faster one of a sum and a product."""
    width = 512
    table = torch.ones(max(n_bytes // 4 // width, 1), width, device=device)
    vector = torch.ones(width, device=device)
    ways: list[Callable[[], object]] = [table.sum, lambda: table @ vector]
    return min(ways, key=lambda way: _seconds(way, device))


def _seconds(way: Callable[[], object], device: str) -> float:
    """Return the shortest of a few times, the first not counted."""
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        way()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
