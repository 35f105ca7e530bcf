"""Compressed and restored: the same bytes, in as many bits as the model says."""

import math
import sys

import numpy as np
import pytest
import torch

from transformer_xl.apps.compress import Settings, compress, decompress, needs_model
from transformer_xl.apps.compress.header import Learning
from transformer_xl.data import train_vocab
from transformer_xl.inference.evaluate import NGramCache
from transformer_xl.model import TransformerXL
from transformer_xl.ops import use_backend

# More than the header can be.
_FIXED = 160
CONTENTS = {
    "empty": b"",
    "one-byte": b"\xff",
    "two-bytes": b"\0\0",
    "zeros": bytes(300),
    "text": "Zürich, 東京, naïve 🙂\r\n".encode() * 8,
    "noise": np.random.default_rng(0).bytes(300),
}


@pytest.mark.parametrize("data", CONTENTS.values(), ids=CONTENTS.keys())
@pytest.mark.parametrize("way", ["trained", "trained-learning", "fresh"])
def test_every_content_comes_back(model, vocab, data, way):
    streams = min(max(len(data), 1), 16)
    settings = Settings(learn=way != "trained", streams=streams, segment_len=16, mem_len=8)
    given = (None, None) if way == "fresh" else (model, vocab)
    content = compress(data, *given, settings).content
    assert len(content) <= len(data) + _FIXED
    if not needs_model(content):
        given = (None, None)
    assert decompress(content, *given) == data


@pytest.mark.parametrize(("streams", "segment_len", "mem_len"), [(5, 1, 0), (64, 33, 9)])
def test_any_cut_comes_back(model, vocab, surprising, streams, segment_len, mem_len):
    data = surprising[:301]
    settings = Settings(streams=streams, segment_len=segment_len, mem_len=mem_len)
    content = compress(data, model, vocab, settings).content
    assert decompress(content, model, vocab) == data


@pytest.fixture
def without_counts(monkeypatch):
    """Have models code alone."""
    monkeypatch.setattr("transformer_xl.apps.compress.planning.MOST_COUNTED", 0)


@pytest.mark.usefixtures("without_counts")
def test_the_size_is_what_the_model_says(model, vocab, surprising):
    settings = Settings(streams=4, segment_len=32)
    found = compress(surprising, model, vocab, settings)
    # The loss as an evaluation computes it: whole parts at once, in single precision.
    parts = torch.tensor(list(surprising)).view(4, -1)
    before = torch.cat([torch.full((4, 1), ord("\n")), parts[:, :-1]], 1)
    with torch.no_grad():
        nll = model(before, None, parts, attn_len=9).nll
    bits = nll.double().sum().item() / math.log(2)
    # Under a thousandth of what a megabyte becomes, at one bit a byte.
    assert bits < 8 * len(found.content) < 1.0004 * bits + 8 * _FIXED
    assert found.report()["bits_per_byte"] < 7.5


def test_the_size_is_what_model_and_counts_say(model, vocab):
    data = b"the cat sat on the mat, the dog on the log. " * 12
    found = compress(data, model, vocab, Settings(streams=1, segment_len=32))
    text = torch.tensor([[ord("\n"), *data]])
    with torch.no_grad():
        nll = model(text[:, :-1], None, text[:, 1:], attn_len=9).nll
    cache = NGramCache()
    bits = sum(-math.log2(cache.read(b, math.exp(-x))) for b, x in zip(data, nll[0], strict=True))
    assert bits < 8 * len(found.content) < 1.01 * bits + 8 * _FIXED
    assert bits < 0.2 * nll.sum().item() / math.log(2)
    assert decompress(found.content, model, vocab) == data


def test_it_does_not_matter_how_it_is_computed(model, vocab, surprising):
    data = surprising[:1000]
    with use_backend("skew"):
        content = compress(data, model, vocab, Settings(streams=9)).content
    torch.set_num_threads(2)
    with use_backend("reference"):
        assert decompress(content, model, vocab) == data
        assert compress(data, model, vocab, Settings(streams=9)).content[60:] == content[60:]


def test_noise_among_text_is_coded_without_the_model(model, vocab, surprising, noise):
    settings = Settings(streams=40, segment_len=16)
    alone = compress(surprising, model, vocab, settings)
    both = compress(surprising + noise, model, vocab, settings)
    assert decompress(both.content, model, vocab) == surprising + noise
    assert len(both.content) < (len(alone.content) + len(noise)) * 1.005


@pytest.mark.parametrize(("optimizer", "lr"), [("adamw", 0.1), ("muon", 0.03)])
@pytest.mark.usefixtures("without_counts")
def test_learning_pays_and_repeats_itself(model, vocab, optimizer, lr, monkeypatch):
    # Muon is that of archives of before.
    monkeypatch.setattr(
        "transformer_xl.apps.compress.planning.Learning",
        lambda **fields: Learning(**fields | {"optimizer": optimizer}),
    )
    data = b"the cat sat on the mat. " * 50

    def found(lr):
        settings = Settings(learn=True, lr=lr, streams=16, segment_len=5, mem_len=8)
        return compress(data, model, vocab, settings).content

    before = {name: x.clone() for name, x in model.named_parameters()}
    content = found(lr)
    assert needs_model(content)
    assert all(torch.equal(x, before[name]) for name, x in model.named_parameters())
    assert len(content) < 0.8 * len(data)
    # Without learning it is of no use.
    assert not needs_model(found(1e-9))
    assert found(lr) == content
    assert decompress(content, model, vocab) == data


@pytest.mark.parametrize("kind", ["chars", "bpe"])
def test_a_vocabulary_of_text_takes_what_it_restores(tiny, kind):
    text = "a cat, a dog, a čaj\n" * 30
    vocab = train_vocab(kind, [text], 300 if kind == "bpe" else None)
    config = tiny.__class__(vocab_size=len(vocab), n_layer=1, n_head=2, d_model=8, d_inner=8)
    model = TransformerXL(config).eval()
    data = text.encode()
    content = compress(data, model, vocab, Settings(streams=20)).content
    assert needs_model(content)
    assert decompress(content, model, vocab) == data
    with pytest.raises(ValueError, match=r"not UTF-8.*a model of bytes compresses any file"):
        compress(b"a cat \xff", model, vocab)
    if kind == "chars":
        with pytest.raises(ValueError, match=r"cannot represent this file.*'Z'"):
            compress(b"Z", model, vocab)


def test_a_missing_library_is_named_before_a_model_is_loaded(model, vocab, surprising, monkeypatch):
    archive = compress(surprising, model, vocab).content
    monkeypatch.setitem(sys.modules, "constriction", None)
    for act in (lambda: compress(b"", model, vocab), lambda: decompress(archive)):
        with pytest.raises(RuntimeError, match="needs the library constriction"):
            act()


def test_what_cannot_be_coded_is_refused(model, vocab, tiny):
    broken = TransformerXL(tiny)
    with torch.no_grad():
        broken.softmax.bias[0] = math.nan
    with pytest.raises(RuntimeError, match="not finite"):
        compress(b"abc", broken, vocab)
    with pytest.raises(ValueError, match="streams=0"):
        Settings(streams=0)
    with pytest.raises(ValueError, match=r"lr=0.1 without learn"):
        Settings(lr=0.1)
    with pytest.raises(ValueError, match="without a model"):
        compress(b"abc")
    with pytest.raises(ValueError, match="give its own vocabulary"):
        compress(b"abc", model, train_vocab("chars", ["abc"]))
