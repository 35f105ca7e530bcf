"""Lossless compression with a model: a symbol of probability p costs -log2 p bits."""

from transformer_xl.apps.compress.choosing import Choice, compress_best, find
from transformer_xl.apps.compress.contents import (
    Compressed,
    UnrestorableError,
    compress,
    decompress,
    needs_model,
    store,
)
from transformer_xl.apps.compress.header import ArchiveError
from transformer_xl.apps.compress.planning import Settings

__all__ = [
    "ArchiveError",
    "Choice",
    "Compressed",
    "Settings",
    "UnrestorableError",
    "compress",
    "compress_best",
    "decompress",
    "find",
    "needs_model",
    "store",
]
