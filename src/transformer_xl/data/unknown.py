"""What a text holds that a vocabulary has no symbol for: named, counted, and where it is."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformer_xl.data.vocab import Vocab

_LISTED = 5
UNDECODED = re.compile("[\udc80-\udcff]")
"""Bytes that are no UTF-8, as ``surrogateescape`` decodes them."""

_READS_ANY = "use a model trained with --data.vocab bytes (or bpe), which reads any text"
_NEEDED_NONE = (
    f"it has no <unk>, because its training text needed none: remove them, or {_READS_ANY}"
)
REMEDIES = {
    "chars": _NEEDED_NONE,
    "words": _NEEDED_NONE,
    "integers": "it has the integers of its training text, or those below its size: remove the "
    "others, or train on a text that has them or with a larger --data.vocab_size",
    "imported": f"it has no <unk>: remove them, or {_READS_ANY}",
}
"""Why a kind of vocabulary refuses what it lacks, and what to do; other kinds refuse nothing."""


def describe_unknown(unknown: Counter[str], line: int) -> str:
    """Name the first of some symbols, say how many there are, and where the first one is."""
    names = ", ".join(map(_name, list(unknown)[:_LISTED]))
    more = len(unknown) - _LISTED
    others = f" and {more:,} more" if more > 0 else ""
    return f"{names}{others} ({unknown.total():,} in all, the first in line {line:,})"


def unknown_warning(vocab: "Vocab", text: str, ids: Sequence[int]) -> str | None:
    """Describe what of a text is read as ``<unk>`` in the symbols of it; None: nothing is."""
    if vocab.unk_id is None or vocab.unk_id not in ids or not (unknown := vocab.unknown(text)):
        return None
    what = describe_unknown(unknown, vocab.first_unknown_line(text))
    return f"not in the vocabulary: {what}; read as <unk>"


def treated(vocab: "Vocab", unknown: Counter[str]) -> Counter[str]:
    """Count by what `Vocab.encode_known` does with each of the unknown."""
    n_left_out = unknown.total()
    if vocab.unk_id is not None:
        undecoded = (n for x, n in unknown.items() if UNDECODED.fullmatch(x))
        n_left_out = sum(undecoded) if vocab.skips_undecoded else 0
    # Positive counts alone.
    return +Counter({"read as <unk>": unknown.total() - n_left_out, "left out": n_left_out})


def _name(symbol: str) -> str:
    return f"the byte 0x{ord(symbol) - 0xDC00:02x}" if UNDECODED.fullmatch(symbol) else repr(symbol)
