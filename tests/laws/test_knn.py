"""kNN-LM over the past of a text: the mixture, by its definition, wherever a text is read."""

import math
from dataclasses import replace

import pytest
import torch
from tests.laws.conftest import CONFIG

from transformer_xl.config import ModelConfig
from transformer_xl.config.knn import KnnConfig
from transformer_xl.inference.evaluate import Passage, WithNeighbours, evaluate
from transformer_xl.inference.knn import Past
from transformer_xl.model import build_model

SETTINGS = KnnConfig(k=3, share=0.4, temperature=0.05, window=6)
TEXT = torch.randint(CONFIG.vocab_size, (30,), generator=torch.Generator().manual_seed(3))


def mixture(hidden, tokens, log_probs, settings=SETTINGS, reset_at=None):
    """Return the mixture at each position, from the hidden states and tokens of a whole text."""
    found = []
    for t in range(len(hidden)):
        first = max(0, t - settings.window)
        resets = [n for n in range(t + 1) if tokens[n] == reset_at]
        past = range(max([first, *resets[-1:]]), t)
        distance = {i: float((hidden[t] - hidden[i]).square().mean()) for i in past}
        nearest = sorted(past, key=distance.__getitem__)[: settings.k]
        # From the nearest one on, so that not all of them are too small for a number.
        more = {i: distance[i] - distance[nearest[0]] for i in nearest}
        weight = {i: math.exp(-more[i] / settings.temperature) for i in nearest}
        probs = log_probs[t].exp()
        if nearest:
            probs = probs * (1 - settings.share)
            for i in nearest:
                share = settings.share * weight[i] / sum(weight.values())
                probs[int(tokens[i + 1])] += share
        found.append(probs)
    return torch.stack(found)


@torch.no_grad()
def as_read(model, segments, **lengths):
    """Return hidden states and log-probabilities of the segments of a text."""
    mems, hidden, log_probs = None, [], []
    for segment in segments:
        out = model(segment[None], mems, **lengths)
        mems = out.mems
        hidden.append(out.hidden[0])
        log_probs.append(out.log_probs[0])
    return torch.cat(hidden), torch.cat(log_probs)


@torch.no_grad()
def losses(model, text, **lengths):
    how = WithNeighbours(knn=SETTINGS, **lengths)
    pieces = how.losses(model, Passage.of(text, model.config), how.lengths(model.config))
    return torch.cat([nll[0] for nll, _ in pieces])


def test_a_loss_is_that_of_the_mixture(model):
    found = losses(model, TEXT, segment_len=4, mem_len=40)
    hidden, log_probs = as_read(model, TEXT[:-1].split(4), mem_len=40)
    probs = mixture(hidden, TEXT, log_probs)
    torch.testing.assert_close(probs.sum(1), torch.ones(len(probs), dtype=probs.dtype))
    expected = -probs.gather(1, TEXT[1:, None])[:, 0].log()
    # Distances are computed in float32.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    result = evaluate(model, TEXT, WithNeighbours(segment_len=4, mem_len=40, knn=SETTINGS))
    assert result.nll == pytest.approx(float(expected.mean()), rel=1e-4)
    assert (result.knn_k, result.knn_window) == (3, 6)


def test_without_it_nothing_changes_and_a_share_of_nearly_nothing_changes_nearly_nothing(paper):
    plain = evaluate(paper, TEXT)
    assert plain.knn_k is plain.knn_share is None
    little = evaluate(paper, TEXT, WithNeighbours(knn=replace(SETTINGS, share=1e-9)))
    assert little.nll == pytest.approx(plain.nll, abs=1e-6)


def test_the_future_changes_no_loss(paper):
    other = torch.cat([TEXT[:15], (TEXT[15:] + 1) % CONFIG.vocab_size])
    one, two = (losses(paper, x, segment_len=8) for x in (TEXT, other))
    assert torch.equal(one[:14], two[:14])
    assert not torch.equal(one[14:], two[14:])


@pytest.mark.parametrize("reset_at", [None, 2])
def test_pieces_change_nothing(reset_at):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(200, 5, generator=generator)
    tokens = torch.randint(9, (200,), generator=generator)
    settings = KnnConfig(k=4, window=50)
    log_probs = torch.full((200, 9), -math.log(9))
    # A token before them all, which begins no text.
    text = torch.cat([torch.zeros(1, dtype=torch.int64), tokens])
    probs = mixture(hidden, text, log_probs, settings, reset_at)
    past, found = Past(settings, reset_at), []
    for start, stop in ((0, 1), (1, 64), (64, 65), (65, 130), (130, 131), (131, 200)):
        part = slice(start, stop)
        found.append(past.mixed_nll(-log_probs[part, 0], hidden[part], tokens[part]))
    expected = -probs.gather(1, tokens[:, None])[:, 0].log()
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-3, atol=1e-4)


def test_a_lstm_has_a_past_too():
    config = ModelConfig(kind="lstm", vocab_size=CONFIG.vocab_size, d_model=12, n_layer=1)
    model = build_model(config).eval()
    plain, mixed = (evaluate(model, TEXT, how).nll for how in (None, WithNeighbours(knn=SETTINGS)))
    assert plain != mixed


def test_an_evaluation_of_the_first_segments_is_that_of_their_text(paper):
    some = evaluate(paper, TEXT, WithNeighbours(segment_len=4, max_steps=3, knn=SETTINGS))
    whole = evaluate(paper, TEXT[:13], WithNeighbours(segment_len=4, knn=SETTINGS))
    assert some.tokens == whole.tokens == 12
    assert some.nll == pytest.approx(whole.nll, rel=1e-12)


@torch.no_grad()
def test_under_autocast_the_past_is_searched_in_float32():
    draw = torch.Generator().manual_seed(1)
    hidden, tokens = torch.randn(40, 32, generator=draw), torch.arange(40)
    rows = torch.full((40,), 4.0), hidden, tokens % 5
    exact = Past(SETTINGS).mixed_nll(*rows)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(Past(SETTINGS).mixed_nll(*rows), exact)
