"""Classical Chinese poems by characters: bits per character, beside n-grams.

Characters that the training text does not have are one symbol, ``<unk>``, for models and n-grams
alike. What it would take to say which of them it is, each as likely, is the same for all, and is
reported as ``unknown``.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from transformer_xl.data import SPLITS, Vocab, load_vocab, train_vocab
from transformer_xl.errors import DataError
from transformer_xl.model import Reader
from transformer_xl.studies.baselines import KneserNey, unigram_nll
from transformer_xl.tasks.task import Measured, Task, Trained, read_utf8

ORDER = 5
HAN = 0x9FFF - 0x4E00 + 1
"""Code points of the block of Chinese characters."""
_VOCAB = "vocab"


class Poems(Task):
    """A poem is its title and its lines; an empty line ends it."""

    name = "poems"
    title = "Poems of the Tang, by characters"
    metric = "bits per character"
    models = {"txl": ("poems",)}  # noqa: RUF012
    reads = tuple(f"{split}.txt" for split in SPLITS)

    def prepare(self, source: Path, folder: Path) -> None:
        """Write the texts, and learn the vocabulary, most frequent characters first."""
        text = {}
        for split in SPLITS:
            path = source / f"{split}.txt"
            text[split] = read_utf8(path)
            # One character has none before it from which it could be predicted.
            if len(text[split]) < 2:
                raise DataError(f"{path} has one character: give poems")
            (folder / f"{split}.txt").write_text(text[split], "utf-8", newline="\n")
        (folder / _VOCAB).mkdir()
        held_out = [text["valid"], text["test"]]
        vocab = train_vocab("chars", [text["train"]], held_out=held_out, by_frequency=True)
        vocab.save(folder / _VOCAB)

    def measure(self, trained: Trained, folder: Path, split: str) -> Measured:
        """Read the poems one after the other, with the memory carried."""
        ids = _ids(trained.vocab, folder, split)
        scores = Reader(trained.model, trained.lengths).read(ids)
        return _measured(trained.vocab, ids, [-x for x in scores if x is not None])

    def baselines(self, folder: Path, split: str) -> Iterator[tuple[str, Measured]]:
        """Yield the frequencies of characters, and n-grams with modified Kneser-Ney smoothing."""
        vocab = load_vocab(folder / _VOCAB)
        train, ids = (_ids(vocab, folder, name) for name in ("train", split))
        measured = partial(_measured, vocab, ids)
        yield "unigram", measured(unigram_nll(train, ids, len(vocab))[1:])
        grams = KneserNey(train, len(vocab), order=ORDER)
        yield f"{ORDER}-gram, Kneser-Ney", measured(grams.nll(ids)[1:])


def _ids(vocab: Vocab, folder: Path, split: str) -> np.ndarray:
    return np.array(vocab.encode_known((folder / f"{split}.txt").read_text("utf-8"))[0])


def _measured(vocab: Vocab, ids: np.ndarray, nll: Sequence[float] | np.ndarray) -> Measured:
    bits = np.array(nll) / math.log(2)
    (newline,) = vocab.encode("\n")
    # A poem ends with an empty line; what follows the last one is part of it.
    ends = np.flatnonzero((ids[1:] == newline) & (ids[:-1] == newline)) + 1
    poems = [poem for poem in np.split(bits, ends) if len(poem)]
    n_unknown = 0 if vocab.unk_id is None else int((ids[1:] == vocab.unk_id).sum())
    unknown = n_unknown * math.log2(max(HAN - len(vocab), 2)) / len(bits)
    scores = np.array([-poem.mean() for poem in poems])
    return Measured({"bits": float(bits.mean()), "unknown": unknown}, scores)
