"""A model for other programs: one step as a function of tensors, with the memory in and out."""

from transformer_xl.interop.export.writing import (
    Errors,
    Exported,
    Format,
    KeptStep,
    StateStep,
    Step,
    export,
    make_step,
)

__all__ = ["Errors", "Exported", "Format", "KeptStep", "StateStep", "Step", "export", "make_step"]
