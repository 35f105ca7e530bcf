"""Lossless compression by a model: each symbol costs -log2 of the probability it was given."""

from transformer_xl.apps.compress.arithmetic import check_installed
from transformer_xl.apps.compress.contents import (
    Compressed,
    UnrestorableError,
    compress,
    decompress,
    needs_model,
)
from transformer_xl.apps.compress.header import ArchiveError
from transformer_xl.apps.compress.planning import Settings

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
