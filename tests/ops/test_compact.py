import pytest
import torch
import torch.nn.functional as F

from transformer_xl.ops import linear
from transformer_xl.ops.packed import FEW_ROWS, Int8Weight

BFLOAT16 = torch.finfo(torch.bfloat16).eps


def exact(weight):
    """The numbers that a compact weight stands for."""
    return weight.values.double() * weight.scales.double()[:, None]


def error(found, x, weight, bias):
    """The error of a product, in units of what rounding it once to bfloat16 costs at most."""
    right = F.linear(x.double(), exact(weight), None if bias is None else bias.double())
    return (found.double() - right).abs().max() / (right.abs().max() * BFLOAT16)


@pytest.mark.parametrize("E", [16, 24, 41, 64])
def test_a_product_is_rounded_and_otherwise_exact(E):
    weight = Int8Weight.of(torch.randn(37, E))
    for batch in ((1,), (3,), (1, 1), (2, 3), (FEW_ROWS + 1,), (40, 2), (0,)):
        for bias in (torch.randn(37).bfloat16(), None):
            x = torch.randn(*batch, E).bfloat16()
            found = linear(x, weight, bias)
            assert (found.shape, found.dtype) == ((*batch, 37), torch.bfloat16)
            # Before the scale, after it, and after the bias.
            assert not found.numel() or error(found, x, weight, bias) <= 2, f"{batch} {bias}"


def test_what_is_multiplied_may_lie_anywhere():
    weight = Int8Weight.of(torch.randn(20, 32))
    wide = torch.randn(3, 100).bfloat16()
    for x in (wide[:, 7:39], wide[1, 5:37], torch.randn(32, 3).bfloat16().T):
        assert error(linear(x, weight, None), x, weight, None) <= 2


def test_rows_of_a_weight_are_a_weight():
    weight = Int8Weight.of(torch.randn(24, 32))
    x = torch.randn(2, 32).bfloat16()
    whole = linear(x, weight, None)
    for rows in (slice(8), slice(8, None), slice(3, 17)):
        torch.testing.assert_close(
            linear(x, weight[rows], None), whole[:, rows], rtol=BFLOAT16, atol=0.0
        )


def test_a_number_moves_by_half_of_what_an_integer_is_worth():
    weight = torch.randn(50, 64) * torch.logspace(-6, 3, 50)[:, None]
    # Zeros stay zeros.
    weight[1] = 0
    moved = (exact(Int8Weight.of(weight)) - weight).abs().amax(1)
    # The worth of an integer is itself rounded to bfloat16.
    assert (moved <= weight.abs().amax(1) / 254 * (1 + BFLOAT16)).all()
