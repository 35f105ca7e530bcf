"""A model whose attention is the fused kernels is the model, on a GPU or in the interpreter."""

import copy

import pytest
import torch

from transformer_xl.ops import use_backend


@pytest.fixture
def device(kernel_device):
    return kernel_device


def losses_and_gradients(model, backend, tokens):
    """Read three segments, with a past that one stream forgets."""
    mems, losses = None, []
    with use_backend(backend):
        for start in (0, 5, 10):
            out = model(tokens[:, start : start + 5], mems, tokens[:, start + 1 : start + 6])
            mems = out.mems.reset([1]) if start == 5 else out.mems
            losses.append(out.nll)
    nll = torch.cat(losses, 1)
    return nll.detach(), dict(zip(names(model), gradients(nll, model), strict=True))


def names(model):
    return [name for name, _ in model.named_parameters()]


def gradients(nll, model):
    return torch.autograd.grad(nll.mean(), [*model.parameters()])


def assert_close(found, exact, allowed):
    assert found.isfinite().all()
    assert (found.double().cpu() - exact).norm() < allowed * exact.norm()


def test_losses_and_gradients_are_those_of_the_exact_model(model, device):
    tokens = torch.randint(model.config.vocab_size, (2, 16))
    exact_nll, exact = losses_and_gradients(model, "reference", tokens)
    fast = copy.deepcopy(model).float().to(device)
    nll, found = losses_and_gradients(fast, "triton", tokens.to(device))
    # Far above the rounding of float32, far below what a wrong mask or distance would make.
    assert_close(nll, exact_nll, 1e-5)
    for name, gradient in found.items():
        assert_close(gradient, exact[name], 1e-4)
