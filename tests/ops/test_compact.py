import pytest
import torch
import torch.nn.functional as F

from transformer_xl.ops import linear
from transformer_xl.ops.native import MOST_ROWS
from transformer_xl.ops.packed import GROUP, Int4Weight, Int8Weight

BFLOAT16 = torch.finfo(torch.bfloat16).eps


def error(found, x, weight, bias):
    """The error of a product, in units of what rounding it once to bfloat16 costs at most."""
    right = F.linear(
        x.double(), weight.dequantize().double(), None if bias is None else bias.double()
    )
    return (found.double() - right).abs().max() / (right.abs().max() * BFLOAT16)


@pytest.fixture(params=[Int8Weight, Int4Weight])
def packing(request):
    return request.param


@pytest.mark.parametrize("E", [16, 24, 41, 64, 100])
def test_a_product_is_rounded_and_otherwise_exact(packing, E):
    weight = packing.of(torch.randn(37, E))
    for batch in ((1,), (2,), (3,), (1, 1), (2, 3), (MOST_ROWS + 1,), (40, 2), (0,)):
        for bias in (torch.randn(37).bfloat16(), None):
            x = torch.randn(*batch, E).bfloat16()
            found = linear(x, weight, bias)
            assert (found.shape, found.dtype) == ((*batch, 37), torch.bfloat16)
            # Before the scale, after it, and after the bias.
            assert not found.numel() or error(found, x, weight, bias) <= 2, f"{batch} {bias}"


def test_what_is_multiplied_may_lie_anywhere(packing):
    weight = packing.of(torch.randn(20, 32))
    wide = torch.randn(3, 100).bfloat16()
    for x in (wide[:, 7:39], wide[1, 5:37], torch.randn(32, 3).bfloat16().T):
        assert error(linear(x, weight, None), x, weight, None) <= 2


def test_rows_of_a_weight_are_a_weight(packing):
    weight = packing.of(torch.randn(24, 32))
    x = torch.randn(2, 32).bfloat16()
    whole = linear(x, weight, None)
    for rows in (slice(8), slice(8, None), slice(3, 17)):
        torch.testing.assert_close(
            linear(x, weight[rows], None), whole[:, rows], rtol=BFLOAT16, atol=0.0
        )


def test_rows_are_looked_up_by_their_index(packing):
    weight = packing.of(torch.randn(24, 40))
    index = torch.tensor([[3, 0], [23, 3]])
    assert torch.equal(weight.rows(index), weight.dequantize().bfloat16()[index])
    for outside in (-1, 24):
        with pytest.raises(IndexError):
            weight.rows(torch.tensor([outside]))


def test_states_that_are_zero_or_as_large_as_may_be_are_multiplied(packing):
    weight = packing.of(torch.randn(8, 64))
    for size in (0, 1e-38, 1e-28, 1e35):
        x = torch.full((2, 64), size).bfloat16()
        found, right = linear(x, weight, None), x.double() @ weight.dequantize().double().T
        assert found.isfinite().all()
        torch.testing.assert_close(found.double(), right, rtol=0.02, atol=1e-29)


def test_four_bits_are_the_nearest_of_their_scale_and_the_scale_fits_the_group():
    weight = torch.randn(50, 70) * torch.logspace(-6, 3, 50)[:, None]
    weight[1] = 0
    packed = Int4Weight.of(weight)
    assert packed.nbytes == 50 * 3 * (16 + 2)
    moved = (packed.dequantize() - weight).abs()
    scales = packed.scales.float().abs().repeat_interleave(GROUP, 1)[:, :70]
    # But for the largest one, which is -8 or 7.
    assert (moved <= 2 * scales).all()
    assert (moved <= scales / 2 * (1 + 1e-5)).float().mean() > 0.9
    error = moved.square().sum() / weight.square().sum()
    assert error.sqrt() < 0.12


def test_a_number_moves_by_half_of_what_an_integer_is_worth():
    weight = torch.randn(50, 64) * torch.logspace(-6, 3, 50)[:, None]
    # Zeros stay zeros.
    weight[1] = 0
    moved = (Int8Weight.of(weight).dequantize() - weight).abs().amax(1)
    # The worth of an integer is itself rounded to bfloat16.
    assert (moved <= weight.abs().amax(1) / 254 * (1 + BFLOAT16)).all()
