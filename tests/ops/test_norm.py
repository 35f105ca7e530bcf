"""The normalization by the root of the mean square, and the kernel that computes its gradients."""

import pytest
import torch
import torch.nn.functional as F

from transformer_xl.ops import rms_norm


def operands(*batch, D=8, dtype=torch.float64):
    x = torch.randn(*batch, D, dtype=dtype) * 3 + 1
    return x.requires_grad_(), torch.randn(D, dtype=dtype).requires_grad_()


def test_each_row_is_divided_by_the_root_of_its_mean_square():
    x, weight = operands(4, 3)
    mean_square = sum(x[..., i] ** 2 for i in range(8)) / 8
    expected = x / (mean_square + 0.1).sqrt()[..., None] * weight
    torch.testing.assert_close(rms_norm(x, weight, 0.1), expected)
    torch.testing.assert_close(rms_norm(x, weight, 0.1), F.rms_norm(x, (8,), weight, 0.1))


@pytest.mark.parametrize("shape", [(5,), (2, 3), (0,), ()], ids=str)
def test_gradients_are_those_of_what_was_computed(shape):
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), operands(*shape))


@pytest.mark.parametrize("learns", ["x", "weight"])
def test_what_needs_no_gradient_gets_none(learns):
    x, weight = operands(3)
    (weight if learns == "x" else x).requires_grad_(False)
    rms_norm(x, weight, 1e-5).sum().backward()
    assert (x.grad is not None, weight.grad is not None) == (learns == "x", learns == "weight")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    x, weight = (y.detach() for y in operands(50, D=256, dtype=dtype))
    exact = rms_norm(x.double(), weight.double(), 1e-5)
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    torch.testing.assert_close(found, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)
