"""Evaluation mode for a while, in which nothing is dropped."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module and all in it into evaluation mode for the length of a ``with`` block.

    Each is put back into the mode that it had, be it another than that of the whole. Threads that
    share a module in training mode put it back for each other: call its ``eval()`` first.
    """
    in_training = [each for each in module.modules() if each.training]
    for each in in_training:
        each.training = False
    try:
        yield
    finally:
        for each in in_training:
            each.training = True
