"""How a text is split and coded: settings, the layout for a model, and its limits.

An archive states its own number of streams and its memory length. The RAM that these imply and the
smallest possible size of the coded text are checked before anything of that size is allocated, both
to compress and to decompress.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32

from transformer_xl.apps.compress import arithmetic
from transformer_xl.apps.compress.header import ArchiveError, Coding, Header, Learning
from transformer_xl.apps.compress.predicting import fingerprint
from transformer_xl.config import ModelConfig
from transformer_xl.config.checks import require
from transformer_xl.model import LanguageModel
from transformer_xl.model.lengths import Lengths


@dataclass(frozen=True)
class Layout:
    """A text split into streams, whose lengths differ by at most 1; the longer ones come first.

    Raises:
        ValueError: There are more streams than symbols.
    """

    n_tokens: int
    """Symbols of the text."""
    streams: int
    """Number of streams."""
    segment_len: int
    """Symbols of each stream in a round."""

    def __post_init__(self) -> None:
        if not 1 <= self.streams <= self.n_tokens:
            raise ValueError(
                f"streams={self.streams} must be at least 1 and at most the {self.n_tokens:,} "
                "symbols of the text"
            )

    @property
    def length(self) -> int:
        """Symbols of the longest stream."""
        return -(-self.n_tokens // self.streams)

    @property
    def n_rounds(self) -> int:
        """Number of rounds."""
        return -(-self.length // self.segment_len)

    def rounds(self) -> Iterator[slice]:
        """Yield the positions of each round in the streams."""
        for start in range(0, self.length, self.segment_len):
            yield slice(start, min(start + self.segment_len, self.length))

    def is_there(self, places: slice) -> Bool[np.ndarray, "T B"]:
        """Which streams have a symbol at these positions; only at the last one some have none."""
        shorter, n_longer = divmod(self.n_tokens, self.streams)
        lengths = shorter + (np.arange(self.streams) < n_longer)
        return np.arange(places.start, places.stop)[:, None] < lengths

    def cut(self, tokens: Int32[np.ndarray, " n"]) -> Int32[np.ndarray, "B length"]:
        """Split a text into streams, padded with 0."""
        parts = np.zeros((self.streams, self.length), dtype=np.int32)
        parts[self.is_there(slice(0, self.length)).T] = tokens
        return parts

    def join(self, parts: Int32[np.ndarray, "B length"]) -> Int32[np.ndarray, " n"]:
        """Join the streams."""
        return parts[self.is_there(slice(0, self.length)).T]


GIGABYTE = 1 << 30
FIRST_CHECK = 1 << 12
"""Symbols before the first checksum in the code."""
CHECK_EVERY = 1 << 18
"""Largest number of symbols between two checksums, up to the end of a round."""

_DOUBLE = 8
_SINGLE = 4


def least_bits(layout: Layout, vocab_size: int) -> float:
    """Return the smallest possible size of a coded text in bits, whatever the model predicts.

    Its symbols, the offset of every round, the choices of its streams, and the checksums.
    """
    each_round = arithmetic.LEAST_SHIFT + layout.streams * arithmetic.LEAST_CHOICE
    apart = CHECK_EVERY + layout.streams * layout.segment_len
    checks = 32 * max(layout.n_tokens // apart - 1, 0)
    symbols = layout.n_tokens * arithmetic.least_bits(vocab_size)
    return symbols + layout.n_rounds * each_round + checks


def ram(config: ModelConfig, coding: Coding) -> int:
    """Return about how many bytes of RAM coding takes, besides the weights and the text.

    An upper bound for compression; decompression needs no more.
    """
    B, T, M = coding.streams, coding.segment_len, coding.mem_len
    N, H, D, V = config.n_layer, config.n_head, config.d_model, config.vocab_size
    S = M + T
    # Keys and values, with a capacity of twice the memory; then the activations of one layer, and
    # logits, steps and weights over the vocabulary.
    kept = 4 * N * B * S * H * config.head_width
    layer = B * T * (4 * D + 2 * config.d_inner) + 3 * B * H * T * S
    found = _DOUBLE * (kept + layer + 4 * B * T * V)
    if coding.learning is not None:
        # Activations of all layers for the backward pass.
        states = N * B * S * D + N * B * T * (12 * D + 4 * config.d_inner)
        found += _SINGLE * (states + 4 * N * B * H * T * S + 3 * B * T * V)
    return found


def too_much(config: ModelConfig, coding: Coding, gigabytes: float) -> str | None:
    """Return a message if coding takes more RAM than the limit."""
    needed = ram(config, coding)
    if needed <= gigabytes * GIGABYTE:
        return None
    return (
        f"streams={coding.streams}, segment_len={coding.segment_len} and "
        f"mem_len={coding.mem_len} take about {needed / GIGABYTE:,.1f} GB of RAM, and "
        f"ram={gigabytes:g} GB are allowed"
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
    # A symbol is one byte in a vocabulary of bytes, else at least one.
    fits = n == size if is_of_bytes else n <= size
    if not (fits and streams <= n):
        raise ArchiveError(
            f"it is damaged: {n:,} symbols in {streams:,} parts cannot be {size:,} bytes"
        )
    layout = Layout(n, streams, coding.segment_len)
    least = least_bits(layout, config.vocab_size)
    # 1 % for the rounding of the coder, and 64 bits because its last words are not full.
    if 0.99 * least > 8 * n_coded + 64:
        raise ArchiveError(
            f"it is damaged: {n:,} symbols cannot be coded in {n_coded:,} bytes, they take "
            f"at least {least / 8:,.0f}"
        )
    if coding.mem_len > layout.length:
        raise ArchiveError(
            f"it is damaged: mem_len={coding.mem_len} is more than the {layout.length} symbols of "
            "a stream"
        )
    problem = too_much(config, coding, gigabytes)
    if problem:
        raise ArchiveError(f"{problem}; allow more (--ram) if the file can be trusted")


RAM = 4.0
"""Default limit of RAM in gigabytes."""
EXACT_FREQUENCIES = True
"""Needed for portable archives; those of version 1 lack it."""

_SYMBOLS_PER_STREAM = 1 << 14
_MAX_LOGITS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a text is coded.

    Raises:
        ValueError: A setting is out of range.
    """

    streams: int | None = None
    """Number of streams: more are faster, but each starts without context. None: one for 16,384
    symbols, at most 256, or 32 if the model learns, or as many as fit into the RAM."""
    segment_len: int | None = None
    """Symbols of each stream in a round, after which a model may learn. None: 64, or 32 if it
    learns, or fewer if the vocabulary is large."""
    mem_len: int | None = None
    """Memory length. None: as the model was trained."""
    learn: bool = False
    """Learn from every round after it was coded."""
    lr: float | None = None
    """Peak learning rate. None: 0.005 for an untrained model, 0.0005 for a trained one."""
    seed: int = 0
    """Seed of the weights of an untrained model."""
    ram: float = RAM
    """Limit of RAM in gigabytes, besides the model and the text; decompression needs as much."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("streams", 1, 1 << 12),
            ("segment_len", 1, 1 << 16),
            ("mem_len", 0, 1 << 16),
            ("lr", 1e-9, 1e3),
            ("seed", 0, (1 << 63) - 1),
            ("ram", 0.001, 1e6),
        ):
            value = getattr(self, name)
            require(
                value is None or least <= value <= most,
                f"{name}={value} must be from {least} to {most}",
            )
        require(
            self.learn or self.lr is None,
            f"lr={self.lr} without learn has no effect: set learn, or leave lr out",
        )


def plan(
    model: LanguageModel,
    vocab_hash: str,
    n_tokens: int,
    settings: Settings,
    learning: Learning | None,
) -> Coding:
    """Choose how a text is coded, with as many streams as fit into the RAM.

    Raises:
        ValueError: The settings take more RAM than they allow.
    """
    V = model.config.vocab_size
    require(V > 1, f"a vocabulary of {V} symbols leaves nothing to code")
    most, segment_len = (32, 32) if learning else (256, 64)
    streams = settings.streams or min(most, max(1, n_tokens // _SYMBOLS_PER_STREAM))
    streams = min(streams, n_tokens)
    mem_len = Lengths.of(model.config, mem_len=settings.mem_len).mem_len
    model_hash = fingerprint(model, vocab_hash)

    def cut(streams: int) -> tuple[Coding, str | None]:
        fitting = max(1, _MAX_LOGITS // (streams * V))
        layout = Layout(n_tokens, streams, settings.segment_len or min(segment_len, fitting))
        coding = Coding(
            model=model_hash,
            n_tokens=n_tokens,
            streams=streams,
            segment_len=layout.segment_len,
            # The memory is never longer than a stream.
            mem_len=min(mem_len, layout.length),
            learning=learning,
            exact_frequencies=EXACT_FREQUENCIES,
        )
        return coding, too_much(model.config, coding, settings.ram)

    coding, problem = cut(streams)
    while problem and settings.streams is None and streams > 1:
        streams //= 2
        coding, problem = cut(streams)
    require(problem is None, f"{problem}; choose a smaller one of them, or allow more ram")
    return coding
