"""The type of the context of an operation with a backward pass of its own."""

from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.function import FunctionCtx

if TYPE_CHECKING:

    class Context(FunctionCtx):
        """What torch hands to both passes of a ``torch.autograd.Function``."""

        needs_input_grad: tuple[bool, ...]
        saved_tensors: tuple[Tensor, ...]
        settings: tuple

else:
    Context = FunctionCtx
