import math
from dataclasses import replace

import pytest
import torch

from transformer_xl.model import Embedding, Softmax, tokens
from transformer_xl.model.tokens import log_uniform_words, sampled_nll

CPU = torch.device("cpu")

WIDTHS = [{}, {"d_embed": 6}, {"d_embed": 6, "tie_projections": True}]


def made(config):
    embedding = Embedding(config)
    softmax = Softmax(config, embedding)
    with torch.no_grad():
        for parameter in {*embedding.parameters(), *softmax.parameters()}:
            parameter.normal_()
    return embedding, softmax


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_the_distribution_is_that_of_its_formula(tiny_config, widths, tie_embeddings):
    config = replace(tiny_config, tie_embeddings=tie_embeddings, **widths)
    embedding, softmax = made(config)
    hidden = torch.randn(2, 3, 16)
    weight = embedding.weight if tie_embeddings else softmax.weight
    projected = hidden
    if widths:
        proj = embedding.proj if config.tie_projections else softmax.proj
        projected = hidden @ proj.weight
    expected = (projected @ weight.T + softmax.bias).softmax(-1)
    torch.testing.assert_close(softmax.log_probs(hidden).exp(), expected)
    torch.testing.assert_close(softmax.log_probs(hidden).exp().sum(-1), torch.ones(2, 3))


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_what_is_tied_is_the_same_and_what_is_not_is_not(tiny_config, widths):
    embedding, softmax = made(replace(tiny_config, **widths))
    assert softmax.weight is embedding.weight
    apart, alone = made(replace(tiny_config, tie_embeddings=False, **widths))
    assert alone.weight is not apart.weight
    assert alone.weight.shape == apart.weight.shape
    if not widths:
        assert softmax.proj is None
        return
    is_tied = "tie_projections" in widths
    assert (softmax.proj.weight is embedding.proj.weight) == is_tied
    assert (alone.proj.weight is apart.proj.weight) == is_tied


@pytest.mark.parametrize("batch", [(4,), (2, 3)])
def test_the_loss_is_minus_the_log_of_the_probability_in_order(tiny_config, batch):
    _, softmax = made(tiny_config)
    hidden, targets = torch.randn(*batch, 16), torch.randint(31, batch)
    expected = -softmax.log_probs(hidden).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(softmax.nll(hidden, targets), expected)


def test_half_precision_is_summed_in_float32(tiny_config):
    _, softmax = made(tiny_config)
    hidden, targets = torch.randn(2, 3, 16), torch.randint(31, (2, 3))
    with torch.autocast("cpu", torch.bfloat16):
        log_probs, nll = softmax.log_probs(hidden), softmax.nll(hidden, targets)
    assert log_probs.dtype == nll.dtype == torch.float32
    # In bfloat16 the sum of the probabilities would miss 1 by about 2 ** -9.
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 3))


V, E = 11, 3


def operands(n=4):
    shapes = ((n, E), (V, E), (V,))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def frequencies():
    """How often each word is drawn, by its formula."""
    share = [math.log((w + 2) / (w + 1)) / math.log(V + 1) for w in range(V)]
    return torch.tensor(share, dtype=torch.float64)


def summed(nll, x, weight, bias, targets):
    """What a loss says that the sum over the vocabulary is."""
    own = (x * weight[targets]).sum(1) + bias[targets]
    return (nll + own).exp()


def test_words_are_drawn_as_often_as_zipf_says():
    n = 20_000
    counts = log_uniform_words(n, V, CPU).bincount(minlength=V)
    expected = frequencies() * n
    assert frequencies().sum() == pytest.approx(1)
    statistic = ((counts - expected) ** 2 / expected).sum()
    # Five standard deviations of a chi-square distribution.
    assert statistic < V - 1 + 5 * math.sqrt(2 * (V - 1))


@pytest.mark.parametrize("vocab_size", [1, 2, 267_735])
def test_drawn_words_are_words_of_the_vocabulary(vocab_size):
    words = log_uniform_words(10_000, vocab_size, CPU)
    assert words.dtype == torch.int64
    assert words.min() >= 0
    assert words.max() < vocab_size
    # The first word is drawn, and so is one of the rarer half.
    assert words.min() == 0
    assert words.max() >= vocab_size // 2


@torch.no_grad()
def test_the_sum_over_the_vocabulary_is_estimated_without_bias():
    inputs, targets = operands(), torch.tensor([0, 3, 3, 10])
    # The mean over all words that the sample may consist of, as often as each is drawn.
    mean = sum(
        q * summed(sampled_nll(*inputs, targets, torch.tensor([word])), *inputs, targets)
        for word, q in enumerate(frequencies())
    )
    x, weight, bias = inputs
    expected = (x @ weight.T + bias).exp().sum(1)
    torch.testing.assert_close(mean, expected, rtol=1e-12, atol=0)


@torch.no_grad()
def test_the_sample_of_two_is_the_mean_of_two_samples():
    inputs, targets = operands(), torch.tensor([0, 3, 3, 10])
    one, other, both = (
        summed(sampled_nll(*inputs, targets, torch.tensor(words)), *inputs, targets)
        for words in ([5], [3], [5, 3])
    )
    torch.testing.assert_close(both, (one + other) / 2, rtol=1e-12, atol=0)


@torch.no_grad()
def test_the_own_target_is_never_counted_twice():
    inputs = operands(V)
    words = torch.arange(V).repeat(3)
    for target in range(V):
        targets = torch.full((V,), target)
        nll = sampled_nll(*inputs, targets, words[words == target])
        # A sample of nothing else leaves nothing to be told apart from.
        torch.testing.assert_close(nll, torch.zeros(V).double(), rtol=0, atol=1e-12)


def test_with_many_samples_the_loss_and_its_gradients_are_the_full_ones():
    inputs, targets = operands(), torch.tensor([0, 3, 3, 10])
    x, weight, bias = inputs
    nll = -(x @ weight.T + bias).log_softmax(1)[range(4), targets]
    expected = torch.autograd.grad(nll.sum(), inputs)
    errors = []
    for n in (100, 1_000_000):
        found = sampled_nll(*inputs, targets, log_uniform_words(n, V, CPU))
        gradients = torch.autograd.grad(found.sum(), inputs)
        pairs = zip((found, *gradients), (nll, *expected), strict=True)
        errors.append(max((one - other).abs().max().item() for one, other in pairs))
    assert errors[1] < 0.02 < errors[0]


def test_a_sample_is_drawn_in_training_only_and_anew_each_time(tiny_config):
    _, sampled = made(replace(tiny_config, sample_softmax=5))
    _, full = made(tiny_config)
    full.load_state_dict(sampled.state_dict())
    hidden, targets = torch.randn(2, 3, 16), torch.randint(31, (2, 3))
    expected = full.nll(hidden, targets)
    first, second = sampled.nll(hidden, targets), sampled.nll(hidden, targets)
    assert first.shape == (2, 3)
    assert not torch.equal(first, second)
    sampled.eval()
    torch.testing.assert_close(sampled.nll(hidden, targets), expected)
    # The distribution is always the whole one.
    assert torch.equal(sampled.train().log_probs(hidden), full.log_probs(hidden))


@pytest.mark.parametrize("n_samples", [0, 7])
def test_training_reads_the_weights_of_its_sample_alone(tiny_config, monkeypatch, n_samples):
    _, own = made(replace(tiny_config, sample_softmax=n_samples, tie_embeddings=False))
    words = torch.tensor([2, 3, 5, 8, 2, 13, 21])
    monkeypatch.setattr(tokens, "log_uniform_words", lambda *about: words)
    own.nll(torch.randn(1, 3, 16), torch.tensor([[30, 1, 2]])).sum().backward()
    learned = own.weight.grad.any(1).nonzero()[:, 0].tolist()
    assert learned == ([1, 2, 3, 5, 8, 13, 21, 30] if n_samples else [*range(31)])


def test_half_precision_samples_are_summed_in_float32(tiny_config):
    _, sampled = made(replace(tiny_config, sample_softmax=5, d_embed=6))
    hidden, targets = torch.randn(2, 3, 16, requires_grad=True), torch.randint(31, (2, 3))
    with torch.autocast("cpu", torch.bfloat16):
        nll = sampled.nll(hidden, targets)
    assert nll.dtype == torch.float32
    nll.sum().backward()
    assert hidden.grad.isfinite().all()
