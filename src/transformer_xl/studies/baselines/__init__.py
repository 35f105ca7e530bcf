"""Baselines without training by gradient: what a text takes by compressors and by counting."""

from transformer_xl.studies.baselines.compressors import COMPRESSORS, compressed_bytes
from transformer_xl.studies.baselines.kneser_ney import KneserNey
from transformer_xl.studies.baselines.measuring import BASELINES, Baseline, baselines, unigram_nll

__all__ = [
    "BASELINES",
    "COMPRESSORS",
    "Baseline",
    "KneserNey",
    "baselines",
    "compressed_bytes",
    "unigram_nll",
]
