from .dynamic import (
    Dynamic,
    gradient_squares,
    plan_dynamic,
)
from .flow import (
    Piece,
    Scored,
    Sums,
    pieces_of,
    scores,
)
from .measuring import (
    Result,
    bytes_of,
    evaluate,
    evaluate_by,
    token_bytes_in,
)
from .strategies import (
    SlidingWindow,
    Strategy,
    WithMemory,
    WithNeighbours,
)
from .streams import (
    Passage,
    require_recordings,
    score,
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
    "evaluate",
    "evaluate_by",
    "gradient_squares",
    "pieces_of",
    "plan_dynamic",
    "require_recordings",
    "score",
    "scores",
    "token_bytes_in",
]
