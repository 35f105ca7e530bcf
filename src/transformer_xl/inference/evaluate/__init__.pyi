from .dynamic import Dynamic, gradient_squares, plan_dynamic
from .measuring import Result, bytes_of, evaluate, evaluate_by, token_bytes_in
from .ngram_cache import (
    NGramCache,
    NGramMixture,
    SortedContexts,
    plan_ngram_cache,
    require_cache,
)
from .strategies import SlidingWindow, Strategy, WithMemory
from .streams import Passage, require_recordings, score

__all__ = [
    "Dynamic",
    "NGramCache",
    "NGramMixture",
    "Passage",
    "Result",
    "SlidingWindow",
    "SortedContexts",
    "Strategy",
    "WithMemory",
    "bytes_of",
    "evaluate",
    "evaluate_by",
    "gradient_squares",
    "plan_dynamic",
    "plan_ngram_cache",
    "require_cache",
    "require_recordings",
    "score",
    "token_bytes_in",
]
