"""Which text, cut into which symbols."""

from dataclasses import dataclass
from typing import Literal

from transformer_xl.config.checks import require, require_fraction, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Which text, cut into which symbols, split how."""

    name: str = ""
    """A corpus known to `txl prepare`, such as tiny-shakespeare; empty: the text at data.path."""
    path: str | None = None
    """File or folder with the text; for a known corpus, a copy of it that is already here."""
    valid_path: str | None = None
    """File or folder with the validation text; None: split it off the text."""
    test_path: str | None = None
    """File or folder with the test text; None: split it off the text."""
    split_by: Literal["fraction", "file"] = "fraction"
    """Split off the end of the text, or whole files spread over the text."""
    valid_fraction: float = 0.05
    """Share of the text held out for validation when no validation text is given."""
    test_fraction: float = 0.05
    """Share of the text held out for the test when no test text is given."""
    vocab: Literal["bytes", "chars", "words", "bpe"] = "bytes"
    """Symbols: bytes, characters, words (an <eos> ends each line), or byte-pair units."""
    vocab_size: int | None = None
    """Largest number of symbols for words and bpe; None: all words, 4,096 byte-pair units."""
    cache_dir: str | None = None
    """Where token files are kept; None: TXL_CACHE, else ~/.cache/transformer_xl."""

    def __post_init__(self) -> None:
        require_positive("vocab_size", self.vocab_size)
        require_fraction("valid_fraction", self.valid_fraction)
        require_fraction("test_fraction", self.test_fraction)
        held_out = self.valid_fraction + self.test_fraction
        require(
            held_out < 1,
            f"valid_fraction + test_fraction = {held_out} leaves no text to train on",
        )
