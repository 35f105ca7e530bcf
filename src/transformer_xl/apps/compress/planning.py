"""How a text is split and coded: settings, the choice for a model, and its limits.

An archive states its own number of streams and its memory length. The RAM that these imply and the
smallest possible size of the coded text are checked before anything of that size is allocated, both
to compress and to decompress.
"""

import math
from codecs import BOM_UTF8
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Interval

from transformer_xl.apps.compress import arithmetic
from transformer_xl.apps.compress.coding import CHECK_EVERY
from transformer_xl.apps.compress.header import ArchiveError, Coding, Header, Learning
from transformer_xl.apps.compress.predicting import FRESH_LR, TRAINED_LR, fingerprint
from transformer_xl.apps.compress.transforms import MOST_GROWN, MOST_SHRUNK
from transformer_xl.config import ModelConfig, check, require
from transformer_xl.errors import SettingsError
from transformer_xl.inference.evaluate import ngram_cache
from transformer_xl.model import LanguageModel, Lengths

GIGABYTE = 1 << 30
RAM = 4.0
"""Default limit of RAM in gigabytes."""
EXACT_FREQUENCIES = EXACT_ROTARY = True
"""Needed for portable archives; those of version 1 lack both, those of version 2 the second one."""

_DOUBLE = 8
_SINGLE = 4
_SYMBOLS_PER_STREAM = 1 << 14
_MAX_LOGITS = 1 << 22
MOST_COUNTED = 1 << 20
"""No more is counted than so many symbols have at most."""
_RAM_PER_COUNTED = 4 * ngram_cache.BYTES
"""Bytes of the limit of RAM for each symbol that is counted: counts take a quarter of it."""


class TooLargeError(SettingsError):
    """Coding takes more RAM than the settings allow."""


def least_bits(coding: Coding, vocab_size: int) -> float:
    """Return the smallest possible size of a coded text in bits, whatever the model predicts.

    Its symbols, the offset of every round, the choices of its streams, and the checksums.
    """
    shift = math.log2(1 + (arithmetic.SHIFTS - 1) / arithmetic.UNSHIFTED)
    each_round = shift + coding.streams * math.log2(1 + 1 / arithmetic.UNCHANGED)
    apart = CHECK_EVERY + coding.streams * coding.segment_len
    checks = 32 * max(coding.n_tokens // apart - 1, 0)
    # No symbol has probability 0.
    symbol = -math.log2(1 - (vocab_size - 1) * 2.0**-24)
    return coding.n_tokens * symbol + coding.n_rounds * each_round + checks


def too_much(config: ModelConfig, coding: Coding, gigabytes: float) -> str | None:
    """Return a message if coding takes more RAM than the limit, besides the weights and the text.

    What it takes is an upper bound for compression; decompression needs no more.
    """
    B, T, M = coding.streams, coding.segment_len, coding.mem_len
    N, H, D, V = config.n_layer, config.n_head, config.d_model, config.vocab_size
    S = M + T
    # Keys and values, with a capacity of twice the memory; then the activations of one layer, and
    # logits, steps and weights over the vocabulary.
    cached = 4 * N * B * S * H * config.head_width
    layer = B * T * (4 * D + 2 * config.d_inner) + 3 * B * H * T * S
    # Keys whose halves are offset are copies.
    layer += 2 * B * S * H * config.head_width * config.key_offset
    needed = _DOUBLE * (cached + layer + 4 * B * T * V)
    n_counted = min(coding.n_tokens, coding.counted)
    needed += ngram_cache.BYTES * n_counted
    if coding.learning is not None:
        # Activations of all layers for the backward pass.
        states = N * B * S * D + N * B * T * (12 * D + 4 * config.d_inner)
        needed += _SINGLE * (states + 4 * N * B * H * T * S + 3 * B * T * V)
    if needed <= gigabytes * GIGABYTE:
        return None
    taken = needed / GIGABYTE
    return (
        f"streams={B}, segment_len={T}, mem_len={M} and the counts of {n_counted:,} symbols take "
        f"about {taken:{',.1f' if taken >= 1 else '.2g'}} GB of RAM, and ram={gigabytes:g} GB are "
        "allowed"
    )


def check_possible(
    header: Header,
    coding: Coding,
    n_coded: int,
    config: ModelConfig,
    is_of_bytes: bool,
    gigabytes: float,
) -> None:
    """Check before anything is allocated that a header is consistent and within the limit of RAM.

    Raises:
        ArchiveError: It is not.
    """
    n, streams, size = coding.n_tokens, coding.streams, header.size
    least = least_bits(coding, config.vocab_size)
    problem = too_much(config, coding, gigabytes)
    # Bytes that are coded.
    least_size = most_size = size
    if coding.transforms:
        least_size, most_size = size // MOST_SHRUNK - len(BOM_UTF8), size * MOST_GROWN
    # A symbol is one byte in a vocabulary of bytes, else at least one.
    if streams > n or n > most_size or (is_of_bytes and n < least_size):
        problem = f"it is damaged: {n:,} symbols in {streams:,} parts cannot be {size:,} bytes"
    # 1 % for the rounding of the coder, and 64 bits because its last words are not full.
    elif 0.99 * least > 8 * n_coded + 64:
        problem = f"it is damaged: {n:,} symbols cannot be coded in {n_coded:,} bytes"
    elif coding.mem_len > coding.length:
        problem = f"it is damaged: mem_len={coding.mem_len} is more than the symbols of a stream"
    elif problem:
        problem += "; allow more (--ram) if the file can be trusted"
    if problem:
        raise ArchiveError(problem)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a text is coded."""

    streams: Annotated[int, Interval(ge=1, le=1 << 12)] | None = None
    """Number of streams: more are faster, but each starts without context. None: one for 16,384
    symbols, at most 256, or 32 if the model learns, or as many as fit into the RAM."""
    segment_len: Annotated[int, Interval(ge=1, le=1 << 16)] | None = None
    """Symbols of each stream in a round, after which a model may learn. None: 64, or fewer if the
    vocabulary is large."""
    mem_len: Annotated[int, Interval(ge=0, le=1 << 16)] | None = None
    """Memory length. None: as the model was trained."""
    learn: bool = False
    """Learn from every round after it was coded."""
    lr: Annotated[float, Interval(ge=1e-9, le=1e3)] | None = None
    """Peak learning rate. None: 0.003 for an untrained model, 0.001 for a trained one."""
    ram: Annotated[float, Interval(ge=0.001, le=1e6)] = RAM
    """Limit of RAM in gigabytes, besides the model and the text; decompression needs as much, or
    the size of the text if it is packed with xz and larger."""

    def __post_init__(self) -> None:
        check(self)
        require(
            self.learn or self.lr is None,
            f"lr={self.lr} without learn has no effect: set learn, or leave lr out",
        )


def plan(
    model: LanguageModel,
    vocab_hash: str,
    n_tokens: int,
    settings: Settings,
    *,
    fresh: bool = False,
    transforms: int = 0,
) -> Coding:
    """Choose how a text is coded, with as many streams as fit into the RAM.

    Args:
        model: The model.
        vocab_hash: Identifies its vocabulary.
        n_tokens: Symbols of the text.
        settings: The settings.
        fresh: Whether the model is the untrained one.
        transforms: Which transforms were applied to the text.

    Raises:
        TooLargeError: The settings take more RAM than they allow.
        SettingsError: The vocabulary has one symbol, or the memory length has no effect.
    """
    learning = None
    if settings.learn:
        learning = Learning(
            fresh=fresh,
            seed=0,
            lr=settings.lr or (FRESH_LR if fresh else TRAINED_LR),
            threads=torch.get_num_threads(),
            device="cuda" if model.device.type == "cuda" else "cpu",
            optimizer="adamw",
        )
    V = model.config.vocab_size
    require(V > 1, f"a vocabulary of {V} symbols leaves nothing to code")
    most, segment_len = 32 if learning else 256, 64
    streams = settings.streams or min(most, max(1, n_tokens // _SYMBOLS_PER_STREAM))
    streams = min(streams, n_tokens)
    model.require_mem_len(settings.mem_len)
    mem_len = Lengths.of(model.config, mem_len=settings.mem_len).mem_len
    model_hash = fingerprint(model, vocab_hash)
    while True:
        coding = Coding(
            model=model_hash,
            n_tokens=n_tokens,
            streams=streams,
            segment_len=settings.segment_len
            or min(segment_len, max(1, _MAX_LOGITS // (streams * V))),
            # Never longer than a stream.
            mem_len=min(mem_len, -(-n_tokens // streams)),
            learning=learning,
            exact_frequencies=EXACT_FREQUENCIES,
            exact_rotary=EXACT_ROTARY,
            counted=min(n_tokens, MOST_COUNTED, int(settings.ram * GIGABYTE) // _RAM_PER_COUNTED),
            transforms=transforms,
        )
        if not (problem := too_much(model.config, coding, settings.ram)):
            return coding
        if settings.streams is not None or streams == 1:
            raise TooLargeError(f"{problem}; choose a smaller one of them, or allow more ram")
        streams //= 2
