from .dynamic import Dynamic, gradient_squares, plan_dynamic
from .measuring import Result, bytes_of, evaluate, evaluate_by, token_bytes_in
from .strategies import SlidingWindow, Strategy, WithMemory
from .streams import Passage, require_recordings, score

__all__ = [
    "Dynamic",
    "Passage",
    "Result",
    "SlidingWindow",
    "Strategy",
    "WithMemory",
    "bytes_of",
    "evaluate",
    "evaluate_by",
    "gradient_squares",
    "plan_dynamic",
    "require_recordings",
    "score",
    "token_bytes_in",
]
