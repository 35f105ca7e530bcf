"""kNN-LM over the past of a text: the mixture, by its definition, wherever a text is read."""

import math

import pytest
import torch
from tests.laws.conftest import CONFIG

from transformer_xl.config.knn import KnnConfig
from transformer_xl.inference.evaluate import WithNeighbours, evaluate
from transformer_xl.inference.generate import Sampling, generate, generate_batch
from transformer_xl.inference.knn import Past, knn_nll
from transformer_xl.model.segment import Lengths

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


def test_a_loss_is_that_of_the_mixture(model):
    lengths = Lengths.of(model.config, segment_len=4, mem_len=40)
    with torch.no_grad():
        pieces = list(knn_nll(model, TEXT, lengths, SETTINGS))
    hidden, log_probs = as_read(model, TEXT[:-1].split(4), mem_len=40)
    probs = mixture(hidden, TEXT, log_probs)
    torch.testing.assert_close(probs.sum(1), torch.ones(len(probs), dtype=probs.dtype))
    expected = -probs.gather(1, TEXT[1:, None])[:, 0].log()
    # Distances are computed in float32.
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=1e-4, atol=1e-4)
    result = evaluate(model, TEXT, WithNeighbours(segment_len=4, mem_len=40, knn=SETTINGS))
    assert result.nll == pytest.approx(float(expected.mean()), rel=1e-4)
    assert (result.knn_k, result.knn_window) == (3, 6)


def test_what_is_written_follows_the_mixture_too(model):
    prompts = [TEXT[:7].tolist(), TEXT[7:9].tolist(), TEXT[:7].tolist()]
    options = {"length": 8, "mem_len": 40, "knn": SETTINGS, "sampling": Sampling(temperature=0)}
    batch = list(generate_batch(model, prompts, **options))
    for n, prompt in enumerate(prompts):
        written = [step[n] for step in batch]
        assert written == list(generate(model, prompt, **options))
        text = torch.tensor([*prompt, *written])
        segments = text[: len(prompt)], *text[len(prompt) : -1].split(1)
        hidden, log_probs = as_read(model, segments, mem_len=40)
        probs = mixture(hidden, text, log_probs)[len(prompt) - 1 :]
        assert probs.argmax(1).tolist() == written


def test_the_future_changes_no_loss(paper):
    lengths = Lengths.of(paper.config, segment_len=8)
    other = torch.cat([TEXT[:15], (TEXT[15:] + 1) % CONFIG.vocab_size])
    with torch.no_grad():
        one, two = (torch.cat(list(knn_nll(paper, x, lengths, SETTINGS))) for x in (TEXT, other))
    assert torch.equal(one[:14], two[:14])
    assert not torch.equal(one[14:], two[14:])


@pytest.mark.parametrize("reset_at", [None, 2])
def test_neither_pieces_nor_copies_change_what_is_found(reset_at):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(200, 5, generator=generator)
    tokens = torch.randint(9, (200,), generator=generator)
    settings = KnnConfig(k=4, window=50)
    whole = Past(settings, reset_at).nearest(hidden, tokens)
    log_probs = torch.full((200, 9), -math.log(9))
    # A token before them all, which begins no text.
    text = torch.cat([torch.zeros(1, dtype=torch.int64), tokens])
    probs = mixture(hidden, text, log_probs, settings, reset_at)
    past, found = Past(settings, reset_at), []
    for start, stop in ((0, 1), (1, 1), (1, 64), (64, 65), (65, 130), (130, 131), (131, 200)):
        some = slice(start, stop)
        earlier = past.copy()
        if stop > start:
            found.append(past.mixed_nll(-log_probs[some, 0], hidden[some], tokens[some]))
        past = past.extended(hidden[some], tokens[some])
        assert len(earlier) <= len(past) <= 50 or reset_at is not None
    expected = -probs.gather(1, tokens[:, None])[:, 0].log()
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-3, atol=1e-4)
    assert whole[0].shape == (200, 4)
