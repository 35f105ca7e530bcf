"""Compressors: sizes are those of the libraries, and a text before another one helps."""

import bz2
import gzip
import lzma
import random

import pytest

from transformer_xl.studies.baselines import compressed_bytes
from transformer_xl.studies.baselines.compressors import PPMD_ORDERS

WORDS = [f"{x}{y}" for x in "abcdefgh" for y in ("on", "ar", "est", "e")]


def _text(seed: int, n: int) -> bytes:
    return " ".join(random.Random(seed).choices(WORDS, k=n)).encode()


TEXT = _text(1, 2000)


def test_sizes_are_those_of_the_libraries():
    pyppmd = pytest.importorskip("pyppmd")
    assert compressed_bytes("gzip -9", TEXT) == len(gzip.compress(TEXT, 9))
    assert compressed_bytes("bzip2 -9", TEXT) == len(bz2.compress(TEXT, 9))
    extreme = lzma.compress(TEXT, preset=9 | lzma.PRESET_EXTREME)
    assert compressed_bytes("xz -9e", TEXT) == len(extreme)
    sizes = [
        len(pyppmd.compress(TEXT, max_order=order, mem_size=64 << 20, variant="H"))
        for order in PPMD_ORDERS
    ]
    assert compressed_bytes("PPMd", TEXT) == min(sizes)


@pytest.mark.parametrize("name", ["xz -9e", "PPMd"])
def test_a_copy_of_the_text_before_takes_next_to_nothing_however_far_back(name):
    pytest.importorskip({"PPMd": "pyppmd"}.get(name, "lzma"))
    noise = random.Random(2).randbytes(3000)
    far = noise + _text(3, 30_000)
    assert len(far) > 100_000
    assert compressed_bytes(name, noise) >= len(noise)
    assert compressed_bytes(name, noise, far) < len(noise) / 5
