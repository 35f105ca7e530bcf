"""What the machine can do at most: multiply large matrices, and read memory."""

import time
from collections.abc import Callable

import torch


def products(dtype: torch.dtype, device: str) -> tuple[Callable[[], object], int]:
    """Return a function that multiplies two large matrices, and its operations.

    On a processor it is the faster one of torch's own product and oneDNN's, which torch uses for
    some precisions only.
    """
    n = 2048 if device == "cpu" else 8192
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    ways: list[Callable[[], object]] = [lambda: a @ b]
    if device == "cpu" and torch.backends.mkldnn.is_available():
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))
    with torch.no_grad():
        best = min(ways, key=lambda way: _seconds(way, device))
    return best, 2 * n**3


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
