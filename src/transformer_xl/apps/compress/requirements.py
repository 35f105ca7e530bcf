"""What coding takes: RAM that a header can ask for, and bits that a text costs at the least.

A file says itself in how many parts it is read and how much is remembered. Both are looked at
before anything of that size is made, by whoever compresses and by whoever restores.
"""

from transformer_xl.apps.compress import arithmetic
from transformer_xl.apps.compress.header import ArchiveError, Coding, Header
from transformer_xl.apps.compress.layout import Layout
from transformer_xl.config import ModelConfig

GIGABYTE = 1 << 30
FIRST_CHECK = 1 << 12
"""Symbols before the first checksum among the coded text."""
CHECK_EVERY = 1 << 18
"""Symbols between two checksums at the most, up to the end of a round."""

_DOUBLE = 8
_SINGLE = 4


def least_bits(layout: Layout, vocab_size: int) -> float:
    """Return what a text costs at the least, however sure the model is.

    Its symbols, the shift of every round, the ways that its parts take, and the checksums.
    """
    each_round = arithmetic.LEAST_SHIFT + layout.streams * arithmetic.LEAST_CHOICE
    apart = CHECK_EVERY + layout.streams * layout.segment_len
    checks = 32 * max(layout.n_tokens // apart - 1, 0)
    symbols = layout.n_tokens * arithmetic.least_bits(vocab_size)
    return symbols + layout.n_rounds * each_round + checks


def ram(config: ModelConfig, coding: Coding) -> int:
    """Return about how many bytes of RAM coding takes, beside the weights and the text.

    It is estimated from above, for who compresses: who restores needs no more.
    """
    B, T, M = coding.streams, coding.segment_len, coding.mem_len
    N, H, D, V = config.n_layer, config.n_head, config.d_model, config.vocab_size
    S = M + T
    # Keys and values, with room for twice the memory; then what one layer makes, and the tables of
    # logits, steps and weights over the vocabulary.
    kept = 4 * N * B * S * H * config.head_width
    layer = B * T * (4 * D + 2 * config.d_inner) + 3 * B * H * T * S
    found = _DOUBLE * (kept + layer + 4 * B * T * V)
    if coding.learning is not None:
        # What the backward pass of every layer needs.
        states = N * B * S * D + N * B * T * (12 * D + 4 * config.d_inner)
        found += _SINGLE * (states + 4 * N * B * H * T * S + 3 * B * T * V)
    return found


def too_much(config: ModelConfig, coding: Coding, gigabytes: float) -> str | None:
    """Say in words if coding takes more RAM than is allowed."""
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
    """Refuse what no file can be, and what takes too much, before anything of that size is made.

    Args:
        header: What the file says.
        coding: How it says that it was coded.
        n_coded: Bytes that were coded.
        config: Of the model.
        is_of_bytes: Whether a symbol is a byte; otherwise it is one or more.
        gigabytes: RAM that may be taken.

    Raises:
        ArchiveError: It cannot be, or takes more.
    """
    n, streams, size = coding.n_tokens, coding.streams, header.size
    # A symbol of bytes is one; another is at least one.
    fits = n == size if is_of_bytes else n <= size
    if not (fits and streams <= n):
        raise ArchiveError(
            f"it is damaged: {n:,} symbols in {streams:,} parts cannot be {size:,} bytes"
        )
    layout = Layout(n, streams, coding.segment_len)
    least = least_bits(layout, config.vocab_size)
    # What the coder rounds, it rounds to far less than a hundredth; its last words are not full.
    if 0.99 * least > 8 * n_coded + 64:
        raise ArchiveError(
            f"it is damaged: {n:,} symbols cannot be coded in {n_coded:,} bytes, they take "
            f"{least / 8:,.0f} at the least"
        )
    if coding.mem_len > layout.length:
        raise ArchiveError(f"it is damaged: it remembers {coding.mem_len} of {layout.length}")
    problem = too_much(config, coding, gigabytes)
    if problem:
        raise ArchiveError(f"{problem}; allow more (--ram) if the file can be trusted")
