from .answers import (
    continuations,
    features_of,
    losses,
)

__all__ = [
    "continuations",
    "features_of",
    "losses",
]
