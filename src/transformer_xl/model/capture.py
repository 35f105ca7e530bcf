"""Capture of a function as a CUDA graph, which a GPU replays with a single launch."""

from collections.abc import Callable

import torch
from torch import Tensor


def captured(
    step: Callable[[], None], first: Tensor, pool: "torch.cuda._POOL_HANDLE | None" = None
) -> Callable[[], None]:
    """Capture a step as a CUDA graph, on a GPU; ``first`` is restored after the warm-up calls.

    Steps that are replayed one after the other may share the memory ``pool`` of their graphs, a
    ``torch.cuda.graph_pool_handle()``.
    """
    if first.device.type != "cuda":
        return step
    before = first.clone()
    # Libraries initialize in the first calls, which cannot be captured.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    first.copy_(before)
    return graph.replay
