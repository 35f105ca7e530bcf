"""Forecasts: paths drawn step by step are those of the model's own distribution."""

import numpy as np
import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.model import build_model
from transformer_xl.model.mixture import LEAST_SCALE
from transformer_xl.model.segment import Lengths
from transformer_xl.tasks.series import forecast as forecasting
from transformer_xl.tasks.series.forecast import forecast

F = 3


def made(**settings):
    torch.manual_seed(1)
    widths = {"n_layer": 2, "n_head": 2, "d_model": 8, "d_inner": 8, "mem_len": 20}
    config = ModelConfig(
        n_features=F, n_mixtures=2, **widths | {"dropout": 0.0, "init_std": 0.4} | settings
    )
    return build_model(config).double().eval()


def certain(model):
    """Leave next to no variance, so that a path follows the mean."""
    with torch.no_grad():
        model.softmax.weight[4:] = 0.0
        model.softmax.bias[4:] = -30.0
        # Both components have the same mean.
        model.softmax.weight[3] = model.softmax.weight[2]
        model.softmax.bias[3] = model.softmax.bias[2]
    return model


@pytest.fixture
def given():
    draw = np.random.default_rng(0)
    return draw.normal(size=(2, 9, F)), draw.normal(size=(2, 5, F - 1)), draw.normal(size=(2, 5))


@pytest.mark.parametrize("kind", [{}, {"kind": "lstm", "n_head": 8, "d_inner": 2048}])
def test_a_path_without_noise_is_what_the_model_predicts_of_itself(given, kind):
    model, (history, known, offsets) = certain(made(**kind)), given
    found = forecast(model, history, 5, known=known, offsets=offsets, paths=2)
    inputs, expected = torch.from_numpy(history), []
    for n in range(5):
        # All is read anew, without a memory.
        with torch.no_grad():
            # Both components have the same mean.
            value = model(inputs).mixture.means[:, -1, 0] + torch.from_numpy(offsets[:, n])
        expected.append(value)
        after = torch.cat([value[:, None], torch.from_numpy(known[:, n])], 1)
        inputs = torch.cat([inputs, after[:, None]], 1)
    expected = torch.stack(expected, 1)[:, None].expand(-1, 2, -1).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=100 * LEAST_SCALE)


def test_the_first_value_has_the_distribution_of_the_model(given):
    model, (history, known, _) = made(), given
    found = forecast(model, history[:1], 1, known=known[:1, :1], paths=20_000)
    with torch.no_grad():
        mixture = model(torch.from_numpy(history[:1])).mixture
    values = torch.from_numpy(np.sort(found[0, :, 0]))
    places = (torch.arange(20_000) + 0.5) / 20_000
    log_weights, means, scales = (x[0, -1] for x in mixture)
    below = (log_weights.exp() * torch.special.ndtr((values[:, None] - means) / scales)).sum(-1)
    # Kolmogorov-Smirnov: a deviation of this size has a probability below 1e-4.
    assert (below - places).abs().max() < 2.2 / 20_000**0.5


def test_a_seed_draws_the_same_paths_and_each_path_is_its_own(given):
    model, (history, known, _) = made(), given
    one, other, third = (forecast(model, history, 5, known=known, seed=x) for x in (1, 1, 2))
    np.testing.assert_array_equal(one, other)
    assert one.shape == (2, 100, 5)
    assert (one != third).all()
    assert len(np.unique(one[0, :, 0])) == 100


def test_series_are_divided_into_batches(given, monkeypatch):
    model, (history, known, _) = certain(made()), given
    other = forecast(model, history, 5, known=known)
    monkeypatch.setattr(forecasting, "_BATCH_SIZE", 1)
    one = forecast(model, history, 5, known=known)
    np.testing.assert_allclose(one, other, rtol=0, atol=100 * LEAST_SCALE)


@pytest.mark.parametrize("reach", [{"mem_len": 2}, {"attn_len": 3}, {"clamp_len": 1}], ids=str)
def test_a_length_is_that_of_a_model_configured_so(given, reach):
    history, known, _ = given
    usual, other = certain(made()), certain(made(**reach))
    lengths = Lengths.of(usual.config, segment_len=1, **reach)
    found = forecast(usual, history, 5, known=known, lengths=lengths)
    expected = Lengths.of(other.config, segment_len=1)
    np.testing.assert_array_equal(found, forecast(other, history, 5, known=known, lengths=expected))
    assert np.abs(found - forecast(usual, history, 5, known=known)).max() > 1e-4


def test_a_model_in_training_is_left_in_training(given):
    model, (history, known, _) = made(dropout=0.5).train(), given
    forecast(model, history, 2, known=known[:, :2])
    assert model.training


def test_what_does_not_fit_is_named(given):
    for change, message in (
        ({"history": np.zeros((2, 9, 2))}, r"history of shape \(2, 9, 2\) must be \(series"),
        ({"history": np.zeros((2, 9))}, r"history of shape \(2, 9\) must be \(series"),
        ({"history": np.zeros((2, 0, F))}, "must be"),
        ({"known": None}, r"known of shape \(2, 5, 0\) must be \(2, 5, 2\)"),
        ({"offsets": np.zeros((2, 4))}, r"offsets of shape \(2, 4\) must be \(2, 5\)"),
        ({"horizon": 0}, "horizon=0 and"),
        ({"paths": 0}, "paths=0 must be at least 1"),
    ):
        history, known, offsets = given
        arguments = {"history": history, "horizon": 5, "known": known, "offsets": offsets} | change
        with pytest.raises(ValueError, match=message):
            forecast(made(), **arguments)
