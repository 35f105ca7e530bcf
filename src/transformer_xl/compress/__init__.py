"""Lossless compression by a model: each symbol costs -log2 of the probability it was given."""

from transformer_xl.compress.contents import (
    Compressed,
    Settings,
    compress,
    decompress,
    needs_model,
)

__all__ = [
    "Compressed",
    "Settings",
    "compress",
    "decompress",
    "needs_model",
]
