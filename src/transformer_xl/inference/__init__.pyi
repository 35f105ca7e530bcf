from .answers import (
    continuations,
    losses,
    next_log_probs,
    states_at,
)

__all__ = [
    "continuations",
    "losses",
    "next_log_probs",
    "states_at",
]
