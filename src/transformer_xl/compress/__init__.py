"""Lossless compression by a model: each symbol costs -log2 of the probability it was given."""

from transformer_xl.compress.contents import (
    Compressed,
    compress,
    decompress,
    needs_model,
)
from transformer_xl.compress.planning import Settings

__all__ = [
    "Compressed",
    "Settings",
    "compress",
    "decompress",
    "needs_model",
]
