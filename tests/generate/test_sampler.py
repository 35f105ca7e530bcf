from dataclasses import replace
from itertools import islice

import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.inference.generate import Sampler, Sampling
from transformer_xl.model import AdaptiveSoftmax, Embedding, Softmax

PROBS = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])


@torch.no_grad()
def made(kind):
    """A distribution that is PROBS whatever the hidden state is."""
    config = ModelConfig(vocab_size=5, d_model=2, n_head=1)
    if kind == "full":
        softmax = Softmax(config, Embedding(config))
    else:
        config = replace(config, cutoffs=(1, 3))
        softmax = AdaptiveSoftmax(config, Embedding(config))
        softmax.cluster_weight.zero_()
        softmax.cluster_bias.copy_(torch.stack([PROBS[1:3].sum(), PROBS[3:].sum()]).log())
    softmax.weight.zero_()
    softmax.bias.copy_(PROBS.log())
    return softmax


def draws(kind, **settings):
    """Tokens without end."""
    sampler, softmax = Sampler(Sampling(**settings)), made(kind)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        while True:
            numbers = torch.rand(1, dtype=torch.float64, generator=generator)
            yield from sampler(softmax, torch.ones(1, 2), numbers)


SAFEST = [
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_p": 1e-9},
    {"temperature": 1e-4},
    {"top_p": 0.39},
    # Numbers that single precision does not hold.
    {"temperature": 1e-40},
    {"temperature": 5e-324},
    {"temperature": 5e-324, "top_k": 3},
    {"top_p": 1e-46},
    {"top_p": 5e-324},
    {"top_p": 5e-324, "top_k": 3},
]


@pytest.mark.parametrize("kind", ["full", "adaptive"])
def test_the_safest_settings_take_the_likeliest_token(kind):
    for settings in SAFEST:
        assert set(islice(draws(kind, **settings), 20)) == {1}
