"""Evaluation: with memory, by sliding windows, dynamic, or with nearest neighbours."""

from transformer_xl.inference.evaluate.dynamic import (
    Dynamic,
    DynamicEvaluation,
    gradient_squares,
    plan_dynamic,
)
from transformer_xl.inference.evaluate.measuring import (
    Result,
    bytes_of,
    cost_of,
    evaluate,
    evaluate_by,
    token_bytes_in,
)
from transformer_xl.inference.evaluate.rollout import Attended, attended
from transformer_xl.inference.evaluate.strategies import (
    SlidingWindow,
    Strategy,
    WithMemory,
    WithNeighbours,
)
from transformer_xl.inference.evaluate.streams import (
    loss_from_start,
    loss_in_segment,
    score,
    spans,
    window_nll,
)

__all__ = [
    "Attended",
    "Dynamic",
    "DynamicEvaluation",
    "Result",
    "SlidingWindow",
    "Strategy",
    "WithMemory",
    "WithNeighbours",
    "attended",
    "bytes_of",
    "cost_of",
    "evaluate",
    "evaluate_by",
    "gradient_squares",
    "loss_from_start",
    "loss_in_segment",
    "plan_dynamic",
    "score",
    "spans",
    "token_bytes_in",
    "window_nll",
]
