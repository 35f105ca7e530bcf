"""Relative effective context length (RECL): section 4.3 and Appendix C of the paper."""

from transformer_xl.studies.recl.contexts import (
    Recl,
    context_losses,
    draw_gains,
    relative_effective_context_length,
    target_places,
)

__all__ = [
    "Recl",
    "context_losses",
    "draw_gains",
    "relative_effective_context_length",
    "target_places",
]
