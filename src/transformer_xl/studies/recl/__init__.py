"""Relative effective context length: how far back a model looks with profit (Appendix C).

`definition` is the paper's definition, on losses; `contexts` measures the losses of a model that
sees exactly so many tokens; `figure` draws the gains.
"""

from transformer_xl.studies.recl.contexts import context_losses, target_places
from transformer_xl.studies.recl.definition import Recl, relative_effective_context_length
from transformer_xl.studies.recl.figure import draw_gains

__all__ = [
    "Recl",
    "context_losses",
    "draw_gains",
    "relative_effective_context_length",
    "target_places",
]
