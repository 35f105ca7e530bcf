"""Export of a model: one step as a function of tensors, with the memory as input and output."""

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
