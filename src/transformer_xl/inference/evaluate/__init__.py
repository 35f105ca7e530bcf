"""Evaluation: with memory, by sliding windows, dynamic, or with nearest neighbours."""

from transformer_xl.inference.evaluate.dynamic import (
    Dynamic,
    gradient_squares,
    plan_dynamic,
)
from transformer_xl.inference.evaluate.flow import (
    Piece,
    Scored,
    Sums,
    pieces_of,
    scores,
    separate_scores,
)
from transformer_xl.inference.evaluate.measuring import (
    Result,
    bytes_of,
    cost_of,
    evaluate,
    evaluate_by,
    token_bytes_in,
)
from transformer_xl.inference.evaluate.strategies import (
    SlidingWindow,
    Strategy,
    WithMemory,
    WithNeighbours,
)
from transformer_xl.inference.evaluate.streams import (
    Passage,
    loss_from_start,
    loss_in_segment,
    require_recordings,
    score,
    spans,
)

__all__ = [
    "Dynamic",
    "Passage",
    "Piece",
    "Result",
    "Scored",
    "SlidingWindow",
    "Strategy",
    "Sums",
    "WithMemory",
    "WithNeighbours",
    "bytes_of",
    "cost_of",
    "evaluate",
    "evaluate_by",
    "gradient_squares",
    "loss_from_start",
    "loss_in_segment",
    "pieces_of",
    "plan_dynamic",
    "require_recordings",
    "score",
    "scores",
    "separate_scores",
    "spans",
    "token_bytes_in",
]
