"""Settings of the text and its tokenization."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from transformer_xl.config.checks import (
    Count,
    Fraction,
    Unused,
    check,
    refuse_unused,
    require,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The text, its tokenization and its splits.

    Example:
        >>> DataConfig(path="mine.txt", vocab="bytes").valid_fraction
        0.05
    """

    name: str = ""
    """A known corpus of `txl prepare`, such as tiny-shakespeare, or hf:ORG/NAME of Hugging Face
    datasets; empty: the text at data.path."""
    path: str | None = None
    """File, folder or glob pattern such as texts/*.txt.gz; several separated by a colon as in PATH;
    for a known corpus, a local copy of it."""
    valid_path: str | None = None
    """The validation text, given as data.path is; None: split off the text."""
    test_path: str | None = None
    """The test text, given as data.path is; None: split off the text."""
    json_field: str = "text"
    """The field of JSON lines, or the column of a Hugging Face dataset, that holds the text."""
    raw: bool = False
    """Read every byte of the files as it is. False: files are text, of which line ends become LF, a
    byte-order mark is left out, and a line end divides files; the texts of known corpora are never
    changed."""
    split_by: Literal["fraction", "file"] = "fraction"
    """Hold out the end of the text, or whole files spread over it."""
    valid_fraction: Fraction = 0.05
    """Share of the text held out for validation if no validation text is given."""
    test_fraction: Fraction = 0.05
    """Share of the text held out for testing if no test text is given."""
    vocab: Literal["bytes", "chars", "words", "bpe", "integers", "authors-bytes", "features"] = (
        "bytes"
    )
    """Tokenization: bytes, characters, words (an <eos> ends each line), byte-pair encoding,
    integers (one sequence per line), or the bytes without line breaks that the authors use for
    enwik8. features: no text but arrays of real vectors in the folder data.path, for a model with
    n_features."""
    vocab_size: Count | None = None
    """Largest vocabulary for words, bpe and integers (0, 1, 2, ... and <eos>); None: all words,
    4,096 byte-pair units, the integers that occur."""
    vocab_from: Literal["train", "all"] | None = None
    """Count words and characters in the training text or in all of it; None: as the authors did for
    a known corpus, else in the training text."""
    tokenizer: str | None = None
    """An existing tokenizer in place of data.vocab, vocab_size and vocab_from: a tokenizer.json of
    Hugging Face, a model or corpus folder with a vocabulary, or the name of a shipped model."""
    reset_at: str | None = None
    """A token such as <eos> at which a new text begins, for shuffled sentences or separate
    documents: it and what follows attend to nothing before it. For bpe it is in no longer unit.
    None: no such token."""
    completion_at: str | None = None
    """A token after which a completion begins, which ends with the next such token, after which a
    prompt follows, or with the next data.reset_at: loss and evaluation count completions only
    (completion-only loss), as of every second column of a table. None: they count every token."""
    workers: Count | None = None
    """Threads that tokenize with byte-pair units or data.tokenizer; None: one for each core if the
    text is long. The result does not depend on their number."""
    cache_dir: str | None = None
    """Where token files are cached; None: TXL_CACHE, else ~/.cache/transformer_xl."""
    corpus: str | None = None
    """The folder of a corpus that txl prepare has built.
    Other settings of the text must be those that it was built with, or at their defaults. None:
    prepare the text at data.name or data.path."""
    verify: Literal["once", "always", "never"] = "once"
    """Verify the checksums of token files once until they change, each time they are opened, or
    never. Sizes are always compared."""

    @property
    def cache_folder(self) -> Path:
        """The folder of prepared corpora and downloads."""
        folder = self.cache_dir or os.environ.get("TXL_CACHE") or "~/.cache/transformer_xl"
        return Path(folder).expanduser()

    @property
    def is_given(self) -> bool:
        """Whether the settings name a text or a corpus."""
        return bool(self.name or self.path or self.corpus)

    def __post_init__(self) -> None:
        check(self, "data")
        held_out = self.valid_fraction + self.test_fraction
        require(
            held_out < 1,
            f"valid_fraction + test_fraction = {held_out} leaves no text to train on",
        )
        require(
            self.completion_at is None or self.reset_at not in (None, self.completion_at),
            f"completion_at={self.completion_at!r} with reset_at={self.reset_at!r}: a completion "
            "ends where the next document begins, so data.reset_at must be another token",
        )
        refuse_unused(self, self.unused())

    def unused(self) -> Iterator[Unused]:
        """Yield the settings that have no effect beside others, which must be at their defaults."""
        if self.vocab == "features":
            about = "vocab='features': the folder data.path holds the arrays of each split"
            texts = (x.name for x in fields(self) if x.name not in ("path", "vocab"))
            yield from (Unused(name, about) for name in texts)
            return
        if self.tokenizer is not None:
            yield Unused("vocab_size", f"tokenizer={self.tokenizer!r}, which has its vocabulary")
            yield Unused("vocab_from", f"tokenizer={self.tokenizer!r}: nothing is counted")
        else:
            if self.vocab not in ("words", "bpe", "integers"):
                yield Unused("vocab_size", f"vocab={self.vocab!r}")
            if self.vocab not in ("words", "chars"):
                yield Unused("vocab_from", f"vocab={self.vocab!r}: nothing is counted")
        if self.corpus:
            yield Unused("raw", f"corpus={self.corpus!r}, which is prepared already")
        if self.name.startswith("hf:"):
            yield Unused("path", f"name={self.name!r}, which says where the text is")
