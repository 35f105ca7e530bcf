"""Baselines of a corpus: one row for each way to predict its text without training by gradient."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
from jaxtyping import Float, Integer

from transformer_xl.data import Corpus
from transformer_xl.errors import InputError
from transformer_xl.inference.evaluate import bytes_of, token_bytes_in
from transformer_xl.studies.baselines.compressors import COMPRESSORS, compressed_bytes
from transformer_xl.studies.baselines.kneser_ney import KneserNey

BASELINES = ("uniform", "unigram", "n-gram", *COMPRESSORS)
"""Names of all baselines."""
TRAINING_BYTES = 64 << 20
"""Bytes of the training text that compressors are given at most, about: its end."""
TRAINING_TOKENS = 8_000_000
"""Tokens of the training text that n-grams are counted in at most: its end. In the worst case,
where hardly a sequence occurs twice, they take 2 GB at order 5."""
_SMALL_VOCAB = 1000
_ORDERS = 12, 5
"""The highest order of n-grams, of vocabularies of up to 1,000 and of larger ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """A row: what a text takes."""

    name: str
    """One of `BASELINES`; of n-grams with the order, as "6-gram"."""
    trained: bool
    """Whether it was given the training text."""
    bits_per_token: float
    bits_per_byte: float | None
    """Bits per byte of text in UTF-8; None where the bytes of tokens are unknown, as of words."""
    tokens: int
    """Number of predicted tokens: all for compressors, all but the first for the others."""


def baselines(
    corpus: Corpus, split: str = "test", *, names: Sequence[str] = BASELINES
) -> list[Baseline]:
    """Measure baselines of a text, each one once without the training text and once with it.

    * uniform: log2 V bits for each token.
    * unigram: the frequency of each token in the training text, with one added to each count.
    * n-gram: modified Kneser-Ney (:class:`KneserNey`). The order is the best on the validation
      text, for lack of one the highest.
    * compressors (`COMPRESSORS`): alone, and after the training text (:func:`compressed_bytes`).
      Other than models, which are fixed after training, they go on learning in the text.

    Bits per byte and per token are those of :class:`~transformer_xl.inference.evaluate.Result`, so
    that rows can stand beside those of models: n-grams predict each token but the first, from those
    before it in the same split. Compressors are given the text in UTF-8 where tokens restore it.
    Where they do not (words, ``<unk>``), they are given the tokens, each as a byte in a vocabulary
    of up to 256, else as the text of the tokens, words with spaces between them.

    Args:
        corpus: The corpus, of any vocabulary.
        split: The text to predict: ``test`` or ``valid``.
        names: Which baselines, in this order. Without pyppmd PPMd is left out, with a warning.

    Returns:
        One row for each of ``names``; for a compressor two, without the training text and with it.

    Raises:
        InputError: The split is empty, the text has fewer than two tokens, or there is no training
            text.
    """
    text, training = np.asarray(corpus.split(split)), corpus.split("train")
    if len(text) < 2:
        raise InputError(f"the {split} text has {len(text)} token: to predict one, give at least 2")
    vocab, n_bytes = corpus.vocab, corpus.n_bytes(split)
    # Compressors take the whole text; other baselines predict all tokens but the first.
    n_predicted = len(text) - 1
    predicted_bytes = bytes_of(token_bytes_in(vocab, text, n_bytes), text[1:])
    rows: list[Baseline] = []

    def add(name: str, trained: bool, bits: float, n_tokens: int, n_bytes: float | None) -> None:
        rows.append(
            Baseline(
                name=name,
                trained=trained,
                bits_per_token=float(bits) / n_tokens,
                bits_per_byte=None if n_bytes is None else float(bits) / n_bytes,
                tokens=n_tokens,
            )
        )

    for name in names:
        if name == "PPMd" and not find_spec("pyppmd"):
            warnings.warn("PPMd is left out: it needs the package pyppmd", stacklevel=2)
            continue
        if name in COMPRESSORS:
            data, training_data = _texts(corpus, split)
            text_bytes = None if vocab.token_bytes is None else n_bytes
            for trained in (False, True):
                bits = 8 * compressed_bytes(name, data, training_data if trained else b"")
                add(name, trained, bits, len(text), text_bytes)
            continue
        if name == "uniform":
            bits = n_predicted * math.log2(len(vocab))
        elif name == "unigram":
            bits = unigram_nll(training, text, len(vocab))[1:].sum() / math.log(2)
        else:
            order = _ORDERS[len(vocab) > _SMALL_VOCAB]
            model = KneserNey(training[-TRAINING_TOKENS:], len(vocab), order=order)
            n_valid = corpus.n_tokens("valid")
            best = model.best_order(corpus.split("valid")) if n_valid else model.order
            name, bits = f"{best}-gram", model.nll(text, order=best)[1:].sum() / math.log(2)
        add(name, name != "uniform", bits, n_predicted, predicted_bytes)
    return rows


def unigram_nll(
    training: Integer[np.ndarray, " length"], text: Integer[np.ndarray, " T"], vocab_size: int
) -> Float[np.ndarray, " T"]:
    """Return -log p of each token, in nats: its frequency in a training text, with one added."""
    counts = np.bincount(training, minlength=vocab_size) + 1
    return -np.log(counts / counts.sum())[text]


def _texts(corpus: Corpus, split: str) -> tuple[bytes, bytes]:
    """Return what compressors are given: the text of a split, and the end of the training text."""
    share = min(TRAINING_BYTES / max(corpus.n_bytes("train"), 1), 1)
    lengths = {split: corpus.n_tokens(split), "train": math.ceil(share * corpus.n_tokens("train"))}
    vocab = corpus.vocab
    try:
        text, before = (corpus.raw(name, last=n) for name, n in lengths.items())
    except ValueError:
        # Both alike, also where only one of them has an <unk>.
        ids = [corpus.split(name)[-n:] for name, n in lengths.items()]
        if len(vocab) <= 256:
            text, before = (x.astype(np.uint8).tobytes() for x in ids)
        else:
            text, before = (vocab.decode(x).encode() for x in ids)
    return text, before
