from dataclasses import replace

import pytest
import torch
from tests.nn.conftest import filled

from transformer_xl.inference.generate.sampler import drawn
from transformer_xl.model import Embedding, Softmax

WIDTHS = [{}, {"d_embed": 6}, {"d_embed": 6, "tie_projections": True}]


def made(config):
    embedding = Embedding(config)
    return filled(embedding, 1.0), filled(Softmax(config, embedding), 1.0)


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


def test_half_precision_is_summed_in_float32(tiny_config):
    _, softmax = made(tiny_config)
    hidden, targets = torch.randn(2, 3, 16), torch.randint(31, (2, 3))
    with torch.autocast("cpu", torch.bfloat16):
        log_probs, nll = softmax.log_probs(hidden), softmax.nll(hidden, targets)
    assert log_probs.dtype == nll.dtype == torch.float32
    # In bfloat16 the sum of the probabilities would miss 1 by about 2 ** -9.
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 3))


@torch.no_grad()
def test_words_are_drawn_as_often_as_they_are_likely():
    probs = torch.tensor([0.25, 0.0, 0.5, 0.25])
    numbers = torch.arange(8).double()[:, None] / 8
    found = torch.cat([drawn(weight * probs[None], x) for x in numbers for weight in (1, 3)])
    assert found.tolist() == [0] * 4 + [2] * 8 + [3] * 4
    with pytest.raises(RuntimeError, match="not finite: its weights are damaged"):
        drawn(probs[None] * torch.nan, numbers[0])
