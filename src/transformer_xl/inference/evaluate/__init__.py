"""Evaluation: with memory, by sliding windows, dynamic, or with nearest neighbours."""

from transformer_xl.inference.evaluate.dynamic import (
    Dynamic,
    DynamicEvaluation,
    gradient_squares,
    plan_dynamic,
    segments_to_learn,
)
from transformer_xl.inference.evaluate.flow import (
    Cutter,
    Flow,
    LineFlow,
    LineSums,
    Piece,
    Scored,
    Sums,
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
    as_text,
    loss_from_start,
    loss_in_segment,
    places_read,
    require_recordings,
    score,
    spans,
    window_nll,
)

__all__ = [
    "Cutter",
    "Dynamic",
    "DynamicEvaluation",
    "Flow",
    "LineFlow",
    "LineSums",
    "Passage",
    "Piece",
    "Result",
    "Scored",
    "SlidingWindow",
    "Strategy",
    "Sums",
    "WithMemory",
    "WithNeighbours",
    "as_text",
    "bytes_of",
    "cost_of",
    "evaluate",
    "evaluate_by",
    "gradient_squares",
    "loss_from_start",
    "loss_in_segment",
    "places_read",
    "plan_dynamic",
    "require_recordings",
    "score",
    "segments_to_learn",
    "spans",
    "token_bytes_in",
    "window_nll",
]
