"""Dropout drops what it says, scales the rest, and gives the gradients of what it computed."""

import pytest
import torch

from transformer_xl.ops import dropout, relu_dropout
from transformer_xl.ops.dropout import rounded


@pytest.mark.parametrize("p", [0.1, 0.25, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_share_is_dropped_and_the_rest_scaled_up(p, dtype):
    n = 200_001
    out = dropout(torch.ones(n, dtype=dtype), p, True)
    is_kept = out != 0
    assert abs(rounded(p) - p) < 1e-5
    scale = torch.tensor(1 / (1 - rounded(p)), dtype=dtype)
    torch.testing.assert_close(out[is_kept], scale.expand(int(is_kept.sum())))
    # Five standard deviations of a share.
    assert abs(is_kept.double().mean() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5
    assert dropout(torch.ones(1_000_000), 1 - 1e-9, True).isfinite().all()


def test_neighbours_are_dropped_independently():
    n = 400_000
    is_kept = (dropout(torch.ones(n), 0.5, True) != 0).double() - 0.5
    for distance in (1, 2, 3, 4, 5, 8):
        together = (is_kept[distance:] * is_kept[:-distance]).mean() * 4
        assert abs(together) < 5 / n**0.5, distance


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_outside_of_training_nothing_is_dropped(p):
    x = torch.randn(50)
    assert torch.equal(dropout(x, p, False), x)
    assert torch.equal(dropout(x, 0.0, True), x)
    assert torch.equal(relu_dropout(x.clone(), p, False), x.relu())
    assert torch.equal(relu_dropout(x.clone(), 0.0, True), x.relu())


@pytest.mark.parametrize("function", [dropout, relu_dropout])
@pytest.mark.parametrize(("p", "locked"), [(0.0, False), (0.4, False), (0.4, True)])
def test_gradients_are_those_of_what_was_computed(function, p, locked):
    x = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True)

    def repeated(x):
        torch.manual_seed(3)
        return function(x * 1, p, True, locked)

    assert torch.autograd.gradcheck(repeated, x)
    assert p == 0 or (repeated(x) == 0).any()


@pytest.mark.parametrize("function", [dropout, relu_dropout])
def test_locked_dropout_drops_the_same_at_all_positions(function):
    x = torch.ones(6, 9, 500)
    out = function(x.clone(), 0.3, True, True)
    assert torch.equal(out, out[:, :1].expand_as(out))
    is_kept = out[:, 0] != 0
    assert len(is_kept.unique(dim=0)) == 6
    assert abs(is_kept.double().mean() - 0.7) < 5 * (0.21 / 3000) ** 0.5
    torch.testing.assert_close(out[out != 0].unique(), torch.tensor([1 / (1 - rounded(0.3))]))
    assert torch.equal(function(x.clone(), 0.3, False, True), x)
    assert torch.equal(function(x.clone(), 0.0, True, True), x)
