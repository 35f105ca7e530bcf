"""The mixture of normal distributions, the output layer for real values."""

import math

import numpy as np
import pytest
import torch
from tests.nn.conftest import filled
from torch.distributions import Categorical, MixtureSameFamily, Normal

from transformer_xl.config import ModelConfig
from transformer_xl.model.mixture import LEAST_SCALE, Mixture, MixtureHead

CONFIG = ModelConfig(n_features=2, n_mixtures=3, n_layer=1, n_head=1, d_model=8, d_inner=8)


def head(std=1.0):
    torch.manual_seed(0)
    return filled(MixtureHead(CONFIG).double(), std)


def mixture():
    return head().mixture(torch.randn(5, 8, dtype=torch.float64))


def of_torch(found):
    weights = Categorical(logits=found.log_weights)
    return MixtureSameFamily(weights, Normal(found.means, found.scales))


def test_the_density_is_that_of_torch():
    found, values = mixture(), torch.randn(5, dtype=torch.float64)
    torch.testing.assert_close(found.log_prob(values), of_torch(found).log_prob(values))


def test_samples_have_the_distribution():
    found = Mixture(*(x[:1].expand(20_000, -1) for x in mixture()))
    draw = torch.Generator().manual_seed(1)
    values = found.sample(draw).sort().values
    # Kolmogorov-Smirnov: a deviation of this size has a probability below 1e-4.
    places = (torch.arange(20_000) + 0.5) / 20_000
    assert (of_torch(found).cdf(values) - places).abs().max() < 2.2 / math.sqrt(20_000)
    assert torch.equal(found.sample(torch.Generator().manual_seed(1)).sort().values, values)


@pytest.mark.parametrize("std", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("value", [0.0, -1e4, 1e6])
def test_extreme_parameters_and_values_have_finite_losses_and_gradients(std, value):
    layer = head(std).float()
    hidden = torch.randn(4, 8, requires_grad=True)
    nll = layer.nll(hidden, torch.full((4,), value))
    nll.sum().backward()
    assert nll.isfinite().all()
    assert layer.mixture(hidden).scales.min() >= LEAST_SCALE
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert hidden.grad.isfinite().all()


def test_a_target_of_nan_has_no_loss_and_no_gradient():
    layer, hidden = head(), torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randn(2, 3, dtype=torch.float64)
    targets[0, 1] = torch.nan
    nll = layer.nll(hidden, targets)
    assert nll[0, 1] == 0
    assert (nll.flatten()[[0, 2, 3, 4, 5]] != 0).all()
    nll.sum().backward()
    assert not hidden.grad[0, 1].any()
    assert np.isfinite(hidden.grad.numpy()).all()
