"""Lossless compression by a model: each symbol costs -log2 of the probability it was given."""

from transformer_xl.compress.arithmetic import check_installed
from transformer_xl.compress.contents import (
    Compressed,
    UnrestorableError,
    compress,
    decompress,
    needs_model,
)
from transformer_xl.compress.header import ArchiveError
from transformer_xl.compress.planning import Settings

__all__ = [
    "ArchiveError",
    "Compressed",
    "Settings",
    "UnrestorableError",
    "check_installed",
    "compress",
    "decompress",
    "needs_model",
]
