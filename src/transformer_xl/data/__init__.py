"""Text in, numbers out: vocabularies, corpora on disk, and the streams a model reads."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformer_xl.data.catalogue import KNOWN_CORPORA
    from transformer_xl.data.corpus import Corpus, raw_split
    from transformer_xl.data.making_vocab import train_vocab
    from transformer_xl.data.preparing import prepare
    from transformer_xl.data.segments import Segments
    from transformer_xl.data.vocab import Vocab
    from transformer_xl.data.vocab_files import load_vocab

__all__ = [
    "KNOWN_CORPORA",
    "Corpus",
    "Segments",
    "Vocab",
    "load_vocab",
    "prepare",
    "raw_split",
    "train_vocab",
]

_HOMES = {
    "KNOWN_CORPORA": "catalogue",
    "Corpus": "corpus",
    "Segments": "segments",
    "Vocab": "vocab",
    "load_vocab": "vocab_files",
    "prepare": "preparing",
    "raw_split": "corpus",
    "train_vocab": "making_vocab",
}


def __getattr__(name: str) -> object:
    # Only Segments needs torch; preparing text should not wait for its import.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
