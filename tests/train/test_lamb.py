"""LAMB against updates computed by hand."""

import math

import pytest
import torch
from torch import nn

from transformer_xl.train.optimizers import Lamb


def stepped(weight, *grads, **settings):
    parameter = nn.Parameter(torch.tensor(weight))
    optimizer = Lamb([parameter], **settings)
    for grad in grads:
        parameter.grad = torch.tensor(grad)
        optimizer.step()
    return parameter.detach()


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


def test_the_length_of_an_update_does_not_depend_on_that_of_the_gradient():
    for scale in (1e-3, 1.0, 1e3):
        weight = [0.6, 0.8]
        found = stepped(weight, [scale, 2 * scale], lr=0.25, betas=(0.0, 0.0), eps=0.0)
        assert (found - torch.tensor(weight)).norm() == pytest.approx(0.25, rel=1e-5), scale


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
