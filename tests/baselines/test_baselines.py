"""Rows of a corpus: what they are per byte and per token, with the training text and without."""

import math
from pathlib import Path

import numpy as np
import pytest

from transformer_xl.config import DataConfig
from transformer_xl.data import Corpus, prepare
from transformer_xl.studies.baselines import (
    BASELINES,
    COMPRESSORS,
    KneserNey,
    baselines,
    compressed_bytes,
    measuring,
    unigram_nll,
)

OURS = ("uniform", "unigram", "n-gram", "gzip -9", "bzip2 -9", "xz -9e")


def _corpus(path: Path, **settings) -> Corpus:
    shares = {"valid_fraction": 0.1, "test_fraction": 0.1}
    return prepare(DataConfig(path=str(path), **shares | settings))


@pytest.mark.slow
def test_random_bytes_take_eight_bits_each(tmp_path):
    pytest.importorskip("pyppmd")
    path = tmp_path / "noise"
    path.write_bytes(np.random.default_rng(0).bytes(60_000))
    rows = baselines(_corpus(path, vocab="bytes", raw=True, test_fraction=0.5))
    assert [(row.name.split("-gram")[0], row.trained) for row in rows] == [
        ("uniform", False), ("unigram", True), ("1", True),
        *((name, trained) for name in COMPRESSORS for trained in (False, True)),
    ]  # fmt: skip
    for row in rows:
        assert row.bits_per_byte == row.bits_per_token
        assert row.bits_per_byte == pytest.approx(8, abs=0.4), row
    assert rows[0].bits_per_byte == 8


@pytest.mark.parametrize("vocab", ["chars", "bytes", "bpe"])
def test_rows_count_the_bytes_of_the_text(toy_text, vocab, monkeypatch):
    monkeypatch.setattr(measuring, "_ORDERS", (3, 3))
    size = {"vocab_size": 280} if vocab == "bpe" else {}
    corpus = _corpus(toy_text, vocab=vocab, **size)
    rows = {(row.name, row.trained): row for row in baselines(corpus, names=OURS)}
    text, n = corpus.split("test"), corpus.n_tokens("test")
    raw = corpus.vocab.decode_bytes(text)
    assert rows["xz -9e", False].bits_per_byte == 8 * compressed_bytes("xz -9e", raw) / len(raw)
    before = corpus.vocab.decode_bytes(corpus.split("train"))
    row = rows["xz -9e", True]
    bits = 8 * compressed_bytes("xz -9e", raw, before)
    assert (row.bits_per_byte, row.bits_per_token) == (bits / len(raw), bits / n)
    row = rows["unigram", True]
    nll = unigram_nll(corpus.split("train"), text, len(corpus.vocab))[1:]
    assert row.bits_per_token == pytest.approx(nll.mean() / math.log(2))
    rest = len(corpus.vocab.decode_bytes(text[1:]))
    assert row.bits_per_byte == pytest.approx(row.bits_per_token * (n - 1) / rest)
    assert row.tokens == n - 1
    model = KneserNey(corpus.split("train"), len(corpus.vocab), order=3)
    order = model.best_order(corpus.split("valid"))
    nll = model.nll(text, order=order)[1:]
    row = rows[f"{order}-gram", True]
    assert row.bits_per_token == pytest.approx(nll.mean() / math.log(2))


def test_words_have_no_bytes_and_compressors_are_given_a_byte_for_each(toy_text):
    corpus = _corpus(toy_text, vocab="words")
    rows = {(row.name, row.trained): row for row in baselines(corpus, names=OURS)}
    assert {row.bits_per_byte for row in rows.values()} == {None}
    ids = bytes(corpus.split("test").tolist())
    bits = 8 * compressed_bytes("gzip -9", ids)
    assert rows["gzip -9", False].bits_per_token == bits / len(ids)


def test_unknown_characters_are_counted_as_those_of_models_are(toy_text, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(toy_text.read_text() + "Ω")
    corpus = _corpus(path, vocab="chars")
    assert corpus.vocab.unk_id in corpus.split("test")
    rows = baselines(corpus, names=("unigram", "xz -9e"))
    text, before = (bytes(corpus.split(name).tolist()) for name in ("test", "train"))
    assert rows[1].bits_per_byte == 8 * compressed_bytes("xz -9e", text) / corpus.n_bytes("test")
    bits = 8 * compressed_bytes("xz -9e", text, before)
    assert rows[2].bits_per_byte == bits / corpus.n_bytes("test")
    for row in rows:
        n_bytes = corpus.n_bytes("test") - (row.name == "unigram")
        assert row.bits_per_byte == pytest.approx(row.bits_per_token * row.tokens / n_bytes)


def test_of_a_long_training_text_the_end_is_used(toy_text, monkeypatch):
    monkeypatch.setattr(measuring, "TRAINING_BYTES", 500)
    monkeypatch.setattr(measuring, "TRAINING_TOKENS", 400)
    monkeypatch.setattr(measuring, "_ORDERS", (2, 2))
    corpus = _corpus(toy_text)
    rows = baselines(corpus, names=("n-gram", "xz -9e"))
    text, training = (corpus.vocab.decode_bytes(corpus.split(x)) for x in ("test", "train"))
    bits = 8 * compressed_bytes("xz -9e", text, training[-500:])
    assert rows[-1].bits_per_byte == bits / len(text)
    model = KneserNey(corpus.split("train")[-400:], len(corpus.vocab), order=2)
    order = model.best_order(corpus.split("valid"))
    loss = model.nll(corpus.split("test"), order=order)[1:].mean() / math.log(2)
    assert rows[0].bits_per_token == pytest.approx(loss)


def test_what_cannot_be_measured_is_refused(toy_text):
    with pytest.raises(ValueError, match="no test split"):
        baselines(_corpus(toy_text, test_fraction=0.0))
    assert BASELINES[:3] == ("uniform", "unigram", "n-gram")


def test_what_is_left_out_is_said(toy_text, monkeypatch):
    monkeypatch.setattr(measuring, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="PPMd is left out: it needs the package pyppmd"):
        rows = baselines(_corpus(toy_text), names=("uniform", "PPMd"))
    assert [row.name for row in rows] == ["uniform"]
