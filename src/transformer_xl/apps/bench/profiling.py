"""A profile of a training step: time by parts of the model, and by operators.

During a profile the functions in :data:`SCOPES` are wrapped to record their scope. An operator
belongs to the innermost scope around it; in the backward pass, to the scope of the operator whose
gradient it computes, which has the same sequence number in torch. Times are self times, without
the operators that an operator calls, so that the parts add up to the step; time spent in Python is
the self time of the scope.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from transformer_xl.apps.bench.speed import circumstances, training, training_size
from transformer_xl.config import Config
from transformer_xl.config.checks import require
from transformer_xl.config.device import pick_device, pick_precision
from transformer_xl.model import (
    AdaptiveEmbedding,
    AdaptiveSoftmax,
    DecoderLayer,
    Embedding,
    FeedForward,
    Memory,
    RelAttention,
    Softmax,
    layer,
)
from transformer_xl.model.variants import positions
from transformer_xl.model.variants.norms import RMSNorm
from transformer_xl.ops.timing import timed
from transformer_xl.train import TrainState
from transformer_xl.train import step as updating
from transformer_xl.train.optim import Optimizer

SCOPES: tuple[tuple[Any, str, str], ...] = (
    (Embedding, "forward", "embedding"),
    (AdaptiveEmbedding, "forward", "embedding"),
    (RelAttention, "position_keys", "projections"),
    (RelAttention, "project", "projections"),
    (RelAttention, "forward", "projections"),
    (layer, "rel_attention", "attention"),
    (positions, "attention", "attention"),
    (FeedForward, "forward", "feed-forward"),
    (DecoderLayer, "forward", "norms, residuals, dropout"),
    (nn.LayerNorm, "forward", "norms, residuals, dropout"),
    (RMSNorm, "forward", "norms, residuals, dropout"),
    (Softmax, "nll", "softmax and loss"),
    (AdaptiveSoftmax, "nll", "softmax and loss"),
    (Memory, "extend", "memory"),
    (updating, "get_total_norm", "optimizer"),
    (updating, "clip_grads_with_norm_", "optimizer"),
    (Optimizer, "step", "optimizer"),
    (TrainState, "add_to_average", "optimizer"),
)
"""Owner and name of each wrapped function, and the part of the model to which it belongs."""
PARTS = (
    "embedding", "projections", "attention: products", "attention: softmax",
    "attention: shift, masks, copies", "feed-forward", "norms, residuals, dropout",
    "softmax and loss", "memory", "adding up gradients", "optimizer", "other",
)  # fmt: skip
_KINDS = (
    # (pattern in the name of an operator of attention, part)
    (r"mm_?$|matmul|mkldnn|scaled_dot_product", "attention: products"),
    (r"softmax", "attention: softmax"),
    (r"", "attention: shift, masks, copies"),
)
_Row = tuple[str, str, str]
"""An operator, the part of the model in which it ran, and forward or backward."""
_SCOPE = "transformer_xl: "
_STEP = f"{_SCOPE}other"
_BACKWARD = "autograd::engine::evaluate_function: "


def profile(config: Config, steps: int) -> dict[str, Any]:
    """Profile ``steps`` training steps by a recipe with the size of its vocabulary.

    Returns:
        Milliseconds of a step by part, and by operator within each part.

    Raises:
        ValueError: ``steps`` is below 1, it is another kind of model, or it would be compiled, in
            which case the parts cannot be told apart.
    """
    require(steps >= 1, f"steps={steps} must be at least 1")
    require(
        not config.train.compile,
        f"train.compile={config.train.compile} fuses the parts that a profile tells apart; "
        "profile with --train.compile False",
    )
    device = pick_device()
    _, step = training(config, device)
    plain = timed(step, steps, device)
    # Otherwise torch logs the start and the end of the profile.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * (device.type == "cuda"))]
    with _scopes(), torch_profile(activities=activities) as taken:
        # The first step includes the set-up of the profiler; without a scope it is not counted.
        step()
        profiled = timed(_scoped(step, _STEP), steps, device, warm_up=0)
    sums = _sums([*(taken.events() or [])], device)
    return {
        **circumstances(config, device),
        **training_size(config),
        "dtype": pick_precision(config.train.precision, device),
        "steps": steps,
        "seconds": plain["seconds"],
        "seconds_profiled": profiled["seconds"],
        **_tables(sums, steps),
    }


@contextmanager
def _scopes() -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in SCOPES]
    try:
        for owner, name, scope in SCOPES:
            setattr(owner, name, _scoped(getattr(owner, name), _SCOPE + scope))
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def _scoped(function: Callable[..., Any], scope: str) -> Callable[..., Any]:
    @wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        with record_function(scope):
            return function(*args, **kwargs)

    return noted


def _sums(events: list[FunctionEvent], device: torch.device) -> dict[_Row, tuple[float, int]]:
    """Sum the self times in microseconds and the calls of each operator in the measured steps."""
    began = min(event.time_range.start for event in events if event.name == _STEP)
    sums: dict[_Row, tuple[float, int]] = {}
    # Scope by the sequence number of a node of the autograd graph.
    makers: dict[int, str] = {}

    def visit(event: FunctionEvent, scope: str, pass_: str) -> None:
        operator = event.name
        if operator.startswith(_SCOPE):
            scope, operator = operator.removeprefix(_SCOPE), "(Python)"
        elif operator.startswith(_BACKWARD):
            is_adding = operator.endswith("AccumulateGrad")
            scope = "adding up gradients" if is_adding else makers.get(event.sequence_nr, "other")
            pass_, operator = "backward", "(autograd)"
        elif event.sequence_nr >= 0 and pass_ == "forward":
            # Several operators can have the same number; the last one created the node.
            makers[event.sequence_nr] = scope
        part = scope
        if scope == "attention":
            part = next(part for pattern, part in _KINDS if re.search(pattern, operator))
        is_cpu = device.type == "cpu"
        own = event.self_cpu_time_total if is_cpu else event.self_device_time_total
        microseconds, calls = sums.get((operator, part, pass_), (0.0, 0))
        sums[operator, part, pass_] = (microseconds + own, calls + 1)
        for child in event.cpu_children:
            visit(child, scope, pass_)

    for event in sorted(events, key=lambda event: event.time_range.start):
        is_outermost = event.cpu_parent is None and event.device_type.name == "CPU"
        if is_outermost and event.time_range.start >= began:
            visit(event, "other", "forward")
    return sums


def _tables(sums: dict[_Row, tuple[float, int]], steps: int) -> dict[str, list[dict[str, Any]]]:
    """Return the time of a step by part, and by operator within each part, the longest first."""
    total = sum(microseconds for microseconds, _ in sums.values())
    operators = [
        {
            **dict(zip(("operator", "part", "pass"), row, strict=True)),
            "ms": microseconds / steps / 1e3,
            "share": microseconds / total,
            "calls": calls / steps,
        }
        for row, (microseconds, calls) in sorted(sums.items(), key=lambda item: -item[1][0])
    ]
    parts = []
    for part in PARTS:
        rows = [row for row in operators if row["part"] == part]
        forward = sum(row["ms"] for row in rows if row["pass"] == "forward")
        backward = sum(row["ms"] for row in rows if row["pass"] == "backward")
        share = sum(row["share"] for row in rows)
        times = {"forward_ms": forward, "backward_ms": backward}
        parts.append({"part": part, "ms": forward + backward, "share": share, **times})
    return {"parts": parts, "operators": operators}
