"""A model for other programs: one step as a function of tensors, with the memory in and out."""

from transformer_xl.interop.export.checking import Errors
from transformer_xl.interop.export.exported_step import KeptStep, StateStep, Step, make_step
from transformer_xl.interop.export.writing import Exported, Format, export

__all__ = ["Errors", "Exported", "Format", "KeptStep", "StateStep", "Step", "export", "make_step"]
