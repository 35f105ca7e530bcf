"""Tokens before a segment that are read again with it are context: nothing is counted twice."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.data import train_vocab
from transformer_xl.inference.answers import continuations, features_of, losses
from transformer_xl.inference.evaluate import WithMemory, evaluate, score
from transformer_xl.inference.generate import Sampling, generate
from transformer_xl.model import TransformerXL
from transformer_xl.model.segment import Lengths

EXACT = {"rtol": 0, "atol": 1e-11}
V = 23
CONFIG = ModelConfig(
    vocab_size=V, n_layer=2, n_head=2, d_model=12, d_inner=20, mem_len=6, dropout=0.0, init_std=0.4
)
TYPES = {
    "paper": {},
    "learned relative": {"attn_type": 1, "n_positions": 9},
    "sinusoids": {"attn_type": 2},
    "learned": {"attn_type": 3, "n_positions": 9, "norm_first": True},
}


@pytest.fixture(params=TYPES)
def model(request):
    return TransformerXL(replace(CONFIG, **TYPES[request.param])).double().eval()


@pytest.fixture
def turn(request):
    """The number of the type, by which values of two parameters meet in turn."""
    return [*TYPES].index(request.node.callspec.params["model"])


@pytest.fixture(params=["paper", "learned relative"])
def relative(request):
    return TransformerXL(replace(CONFIG, **TYPES[request.param])).double().eval()


def twin(model, **changes):
    other = TransformerXL(replace(model.config, **changes)).double().eval()
    other.load_state_dict(model.state_dict())
    return other


def some_text(B=2, length=15):
    return torch.randint(V, (B, length))


def windows(text, T, ext_len):
    """Segments of T tokens with what stands before them, and how much that is."""
    for start in range(0, text.shape[1], T):
        context = min(ext_len, start)
        yield text[:, start - context : start + T], context


def remembered(model, mems):
    """The tokens in the memory of the first layer, told by their embeddings."""
    words = model.embedding(torch.arange(V)[None])[0]
    return torch.cdist(mems.states[0], words).argmin(-1)


@torch.no_grad()
def test_the_memory_holds_all_before_what_is_read_again_and_nothing_twice(model):
    sizes, mem_lens = [(1, 4), (3, 4), (4, 4), (5, 2), (3, 0)], (0, 3, 100)
    for (T, ext_len), mem_len in product(sizes, mem_lens):
        text, mems, end = some_text(), None, 0
        for window, context in windows(text, T, ext_len):
            mems = model(window, mems, mem_len=mem_len, ext_len=ext_len).mems
            end += window.shape[1] - context
            before = max(end - ext_len, 0)
            expected = text[:, max(before - mem_len, 0) : before]
            assert torch.equal(remembered(model, mems), expected), (T, ext_len, mem_len)


@torch.no_grad()
def test_context_has_no_loss(model):
    text = some_text(length=8)
    whole = model(text[:, :-1], targets=text[:, 1:])
    for context in (None, 3):
        out = model(text[:, :-1], targets=text[:, 4:], ext_len=5, context=context)
        assert out.nll.shape == (2, 4)
        torch.testing.assert_close(out.nll, whole.nll[:, 3:], **EXACT)
        torch.testing.assert_close(out.loss, whole.nll[:, 3:].mean(), **EXACT)
        assert out.hidden.shape == (2, 7, 12)


@torch.no_grad()
def by_hand(model, text, ext_len, segment_len=1):
    """The loss of each token, read with what stands right before it and without a memory."""
    found = []
    for start in range(0, len(text) - 1, segment_len):
        window = torch.from_numpy(text[None, :-1][:, max(0, start - ext_len) : start + segment_len])
        targets = torch.from_numpy(text[start + 1 : start + segment_len + 1])
        log_probs = model(window).log_probs[0, -len(targets) :]
        found.append(-log_probs.gather(1, targets[:, None])[:, 0])
    return torch.cat(found)


@pytest.fixture
def text():
    return np.random.default_rng(0).integers(0, V, 20)


def test_without_a_memory_it_is_a_sliding_window(model, turn, text):
    segment_lens = ((1, 3, 19, 50) * 2)[turn:][:4]
    for ext_len, segment_len in zip((0, 2, 4, 30), segment_lens, strict=True):
        lengths = {"mem_len": 0, "ext_len": ext_len}
        result = evaluate(model, text, WithMemory(segment_len=segment_len, **lengths))
        expected = by_hand(model, text, ext_len, segment_len)
        assert (result.tokens, result.ext_len) == (19, ext_len)
        assert len(expected) == 19
        assert result.nll == pytest.approx(expected.mean().item(), rel=1e-12), segment_len
        configured = evaluate(twin(model, **lengths), text, WithMemory(segment_len=segment_len))
        assert (configured.ext_len, configured.nll) == (ext_len, result.nll)


def test_writing_and_scoring_read_nothing_again(model, text):
    other = twin(model, ext_len=4)
    prompt = text[:7].tolist()
    one, two = (
        list(generate(m, prompt, length=9, sampling=Sampling(temperature=0)))
        for m in (model, other)
    )
    assert one == two
    assert list(score(model, prompt, segment_len=2)) == list(score(other, prompt, segment_len=2))


VOCAB = train_vocab("chars", ["abcdefghijklmnopqrstuv\n"])


def texts_of(*sizes):
    draw = np.random.default_rng(1)
    return [draw.integers(0, V, n).tolist() for n in sizes]


@pytest.mark.parametrize("sizes", [(11, 11), (9, 14, 1)], ids=str)
def test_what_follows_a_text_is_said_without_reading_anything_again(model, sizes):
    texts, found = texts_of(*sizes), []
    for ext_len in (0, 4):
        lengths = Lengths.of(model.config, segment_len=4, mem_len=20, ext_len=ext_len)
        how = {"length": 7, "stop": "\n"}
        written = continuations(model, VOCAB, texts, lengths, **how)
        found.append((features_of(model, texts, lengths), written))
    (expected, text), (features, other) = found
    assert torch.equal(features, expected)
    assert other == text
    assert any(text)


def test_the_losses_of_texts_are_those_that_an_evaluation_counts(model):
    texts = texts_of(9, 14, 14, 2)
    for mem_len, ext_len in ((20, 4), (3, 2), (3, 0)):
        how = {"segment_len": 4, "mem_len": mem_len, "ext_len": ext_len}
        lengths = Lengths.of(model.config, **how)
        expected = [evaluate(model, np.array(text), WithMemory(**how)).nll for text in texts]
        for batch_size in (1, 3):
            found = losses(model, texts, lengths, batch_size=batch_size)
            assert [len(own) + 1 for own in found] == [len(text) for text in texts]
            assert [own.mean() for own in found] == pytest.approx(expected, rel=1e-6), batch_size
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        losses(model, texts, lengths._replace(ext_len=2), batch_size=0)


@torch.no_grad()
def read_again(model, T, ext_len, text):
    """The memory after each segment, in places of the text."""
    found, mems = [], None
    for window, _ in windows(text, T, ext_len):
        mems = model(window, mems, mem_len=100, ext_len=ext_len).mems
        found.append(remembered(model, mems)[0].tolist())
    return found


@pytest.mark.parametrize("attn_type", [0, 2])
def test_swapped_lengths_keep_what_is_going_to_be_read_again(attn_type):
    model = TransformerXL(replace(CONFIG, attn_type=attn_type)).double().eval()
    quirky = twin(model, quirks=("swapped_ext_len",))
    text = torch.arange(12)[None]
    # As the authors' code does: its memory is cut where it would be if the lengths of memory and
    # segment were exchanged.
    assert read_again(quirky, 3, 4, text)[:2] == [[0, 1, 2], [0, 1, 2, 0, 1, 2]]
    assert read_again(model, 3, 4, text)[:2] == [[], [0, 1]]
    first, second, third = [0, 1, 2, 3, 4], [3, 4, 5, 6, 7], [8, 9]
    assert read_again(quirky, 5, 2, text) == [first, first + second, first + second + third]
