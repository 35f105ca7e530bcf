from .answers import (
    continuations,
    features_of,
    losses,
    next_log_probs,
)

__all__ = [
    "continuations",
    "features_of",
    "losses",
    "next_log_probs",
]
