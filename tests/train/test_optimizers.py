"""LAMB against updates computed by hand; Muon: orthogonal, as torch's but for its precision."""

import math

import pytest
import torch
from torch import nn

from transformer_xl.train.optimizers import COEFFICIENTS, Lamb, Muon, orthogonalize


def step(optimizer_class, weight, gradients, **settings):
    """Weights after some updates."""
    parameter = nn.Parameter(weight.clone())
    optimizer = optimizer_class([parameter], **settings)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def stepped(weight, *grads, **settings):
    return step(Lamb, torch.tensor(weight), map(torch.tensor, grads), **settings)


def test_two_updates_by_hand():
    found = stepped([3.0, 4.0], [1.0, -2.0], [0.5, 1.0], lr=0.1, betas=(0.5, 0.75), eps=0.0)
    # First: means 0.5 and -1, mean squares 0.25 and 1, so the direction is (1, -1), of length
    # sqrt 2; the weights have length 5.
    step = 0.1 * 5 / math.sqrt(2)
    first = [3 - step, 4 + step]
    # Second: means 0.5 and 0; mean squares 0.75 * 0.25 + 0.25 * 0.25 = 0.25 and 1.
    expected = [first[0] - 0.1 * math.hypot(*first), first[1]]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_decay_is_part_of_the_direction():
    found = stepped([3.0, 4.0], [1.0, 1.0], lr=0.1, betas=(0.0, 0.0), eps=0.0, weight_decay=0.5)
    direction = torch.tensor([1 + 1.5, 1 + 2.0])
    expected = torch.tensor([3.0, 4.0]) - 0.1 * 5 * direction / direction.norm()
    torch.testing.assert_close(found, expected)


def test_long_tensors_count_as_ten():
    found = stepped([30.0, 40.0], [1.0, 0.0], lr=0.1, betas=(0.0, 0.0), eps=1e-9)
    torch.testing.assert_close(found, torch.tensor([29.0, 40.0]))


def test_zeros_move_as_with_adam_and_no_gradient_moves_nothing():
    found = stepped([0.0, 0.0], [2.0, -3.0], lr=0.1, betas=(0.0, 0.0), eps=0.0)
    torch.testing.assert_close(found, torch.tensor([-0.1, 0.1]))
    assert torch.equal(stepped([1.0, 2.0], [0.0, 0.0]), torch.tensor([1.0, 2.0]))
    parameter = nn.Parameter(torch.ones(2))
    Lamb([parameter]).step()
    assert torch.equal(parameter.detach(), torch.ones(2))


def polynomial(x, iterations=5):
    """What the iteration makes of a singular value."""
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        x = a * x + b * x**3 + c * x**5
    return x


def test_updates_are_orthogonal():
    for shape in ((8, 8), (24, 8), (8, 24), (1, 5)):
        u, _, v = torch.linalg.svd(torch.randn(3, *shape), full_matrices=False)
        values = torch.logspace(-1.5, 1, min(shape)).flip(0)
        singular = torch.linalg.svdvals(orthogonalize(u * values @ v, 5))
        assert singular.max() < 1.3, shape
        assert singular.min() > 0.6, shape
        expected = polynomial(values / values.norm()).sort(descending=True).values
        torch.testing.assert_close(singular, expected.expand(3, -1), rtol=1e-4, atol=1e-5)


def test_it_agrees_with_torch_within_the_precision_of_bfloat16():
    for shape in ((32, 32), (48, 16), (16, 48)):
        weight = torch.randn(shape)
        gradients = [torch.randn(shape) for _ in range(3)]
        settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}
        ours = step(Muon, weight, gradients, **settings)
        theirs = step(torch.optim.Muon, weight, gradients, **settings)
        exact = step(
            Muon, weight.double(), [g.double() for g in gradients], dtype=torch.float64, **settings
        )
        # Each of three updates may be off by what iterations in bfloat16 lose, as torch's do.
        error = (theirs - exact).norm()
        assert (ours - exact).norm() < error / 100, shape
        assert error < 0.1 * (exact - weight).norm(), shape


def test_stacked_parts_are_updated_as_matrices_of_their_own():
    weight = torch.randn(24, 8)
    gradients = [torch.randn(24, 8) for _ in range(2)]
    stacked = nn.Parameter(weight.clone())
    optimizer = Muon([{"params": [stacked], "parts": 3}])
    for gradient in gradients:
        stacked.grad = gradient.clone()
        optimizer.step()
    single = [
        step(Muon, part, [gradient.chunk(3)[i] for gradient in gradients])
        for i, part in enumerate(weight.chunk(3))
    ]
    torch.testing.assert_close(stacked.detach(), torch.cat(single))
    whole = step(Muon, weight, gradients)
    assert not torch.allclose(stacked.detach(), whole, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_iterations_are_the_same(device, dtype):
    shapes = [(6, 4), (6, 4), (4, 4), (3, 8)]
    weights = [torch.randn(shape, device=device) for shape in shapes]
    found = []
    for is_captured in (False, True):
        parameters = [nn.Parameter(x.clone()) for x in weights]
        optimizer = Muon(parameters, dtype=dtype, is_captured=is_captured)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
            optimizer.step()
        found.append(parameters)
    assert all(map(torch.equal, *found))
