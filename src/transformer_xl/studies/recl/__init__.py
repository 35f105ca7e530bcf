"""Relative effective context length: how far back a model looks with profit (Appendix C).

`definition` is the paper's definition, on losses; `contexts` measures the losses of a model that
sees exactly so many tokens; `figure` draws the gains.
"""

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
