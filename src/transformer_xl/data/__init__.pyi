from .catalogue import KNOWN_CORPORA
from .corpus import Corpus, raw_split, write_corpus
from .making_vocab import train_vocab
from .preparing import prepare
from .segments import Segments
from .vocab import Vocab
from .vocab_files import load_vocab

__all__ = [
    "KNOWN_CORPORA",
    "Corpus",
    "Segments",
    "Vocab",
    "load_vocab",
    "prepare",
    "raw_split",
    "train_vocab",
    "write_corpus",
]
