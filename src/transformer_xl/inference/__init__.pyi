from .answers import (
    continuations,
    losses,
    next_log_probs,
)

__all__ = [
    "continuations",
    "losses",
    "next_log_probs",
]
