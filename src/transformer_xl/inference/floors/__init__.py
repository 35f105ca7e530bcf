"""Floors: what a text takes without training by gradient, by compressors and by counting."""

from transformer_xl.inference.floors.compressors import COMPRESSORS, compress, compressed_bytes
from transformer_xl.inference.floors.kneser_ney import KneserNey
from transformer_xl.inference.floors.measuring_floors import (
    FLOORS,
    Floor,
    floors,
    floors_table,
    unigram_nll,
)

__all__ = [
    "COMPRESSORS",
    "FLOORS",
    "Floor",
    "KneserNey",
    "compress",
    "compressed_bytes",
    "floors",
    "floors_table",
    "unigram_nll",
]
