"""The kernels of the cross-entropy give its losses and gradients, on a GPU or interpreted."""

import math

import pytest
import torch
import torch.nn.functional as F

from transformer_xl.ops import linear_nll, nll

NAMES = ("losses", "x", "weight", "bias")
E = 5
# Sums in another order, of at most 5,000 exponentials in float32.
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture
def device(kernel_device, monkeypatch):
    # In the interpreter, too, which computes on the CPU.
    monkeypatch.setattr(nll, "has_kernels", lambda device, dtype: True)
    return kernel_device


def chunks_of(rows, monkeypatch):
    monkeypatch.setattr(nll, "CHUNK", 0)
    monkeypatch.setattr(nll, "GPU_CHUNK", 0)
    monkeypatch.setattr(nll, "LEAST_ROWS", rows)


def operands(n, V, dtype=torch.float32):
    shapes = (n, E), (V, E), (V,)
    return [torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in shapes]


def plain(x, weight, bias, targets):
    return F.cross_entropy(F.linear(x, weight, bias), targets, reduction="none")


def losses_and_gradients(loss, inputs, targets, upstream):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    found = loss(*leaves, targets)
    found.backward(upstream.to(found))
    return [x.cpu() for x in (found.detach(), *(x.grad for x in leaves))]


def ours(inputs, targets, upstream, device):
    return losses_and_gradients(
        linear_nll, [x.to(device) for x in inputs], targets.to(device), upstream
    )


@pytest.mark.parametrize(
    ("V", "rows", "upstream"),
    [
        (V, rows, ("all alike", "all different", "nothing")[(row + column) % 3])
        for row, V in enumerate([1, 7, 128, 129, 5000])
        for column, rows in enumerate([1, 4, 256])
    ],
)
def test_losses_and_gradients_are_those_of_cross_entropy(V, rows, upstream, device, monkeypatch):
    chunks_of(rows, monkeypatch)
    inputs, targets = operands(6, V), torch.randint(V, (6,))
    targets[:2] = torch.tensor([0, V - 1])
    weights = {
        "all alike": torch.full((6,), 0.3),
        "all different": torch.linspace(-1, 2, 6),
        "nothing": torch.zeros(6),
    }[upstream]
    found = ours(inputs, targets, weights, device)
    exact = losses_and_gradients(plain, [x.double() for x in inputs], targets, weights)
    for name, one, truth in zip(NAMES, found, exact, strict=True):
        torch.testing.assert_close(one, truth.float(), **ROUNDING, msg=f"{name} differ")


def test_an_ignored_target_has_no_loss_and_no_gradient(device):
    inputs, targets = operands(6, 7), torch.randint(7, (6,))
    targets[[1, 4]] = nll.IGNORED
    exact = losses_and_gradients(plain, inputs, targets, torch.ones(6))
    # Not by linear_nll, which removes them first on the CPU of the interpreter.
    scale = (targets != nll.IGNORED).float().to(device)
    given = [x.to(device) for x in (*inputs, targets)]
    losses, gradients = nll._pass(*given, torch.float32, scale, (True, True, True))
    for one, truth in zip((losses, *gradients), exact, strict=True):
        torch.testing.assert_close(one.cpu(), truth, **ROUNDING)
    assert not gradients[0][[1, 4]].any()


def test_without_gradients_the_losses_are_the_same(device):
    inputs, targets = operands(6, 300), torch.randint(300, (6,))
    found = ours(inputs, targets, torch.ones(6), device)[0]
    assert torch.equal(linear_nll(*(x.to(device) for x in inputs), targets.to(device)).cpu(), found)


def test_a_word_that_cannot_be_has_no_part_in_anything(device):
    (x, weight, bias), targets = operands(6, 7), torch.randint(6, (6,))
    bias[6] = -math.inf
    found, dx, dw, db = ours((x, weight, bias), targets, torch.ones(6), device)
    expected = losses_and_gradients(plain, (x, weight[:-1], bias[:-1]), targets, torch.ones(6))
    assert not dw[6].any()
    assert not db[6]
    for one, other in zip((found, dx, dw[:-1], db[:-1]), expected, strict=True):
        torch.testing.assert_close(one, other, **ROUNDING)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
def test_nan_stays_in_its_row(device):
    (x, weight, bias), targets = operands(6, 7), torch.randint(7, (6,))
    x[2, 1] = math.nan
    found, dx, dw, _ = ours((x, weight, bias), targets, torch.ones(6), device)
    assert found.isnan().tolist() == [n == 2 for n in range(6)]
    assert dx.isnan().any(1).tolist() == [n == 2 for n in range(6)]
    assert dw.isnan().all()


@pytest.mark.parametrize("wrong", [7, -1, 10**9])
def test_a_target_outside_the_vocabulary_has_no_loss(wrong, device):
    targets = torch.randint(7, (6,))
    targets[3] = wrong
    found, dx, dw, _ = ours(operands(6, 7), targets, torch.ones(6), device)
    assert found.isnan().tolist() == [n == 3 for n in range(6)]
    # So that no update is made of them.
    assert dx.isnan().any(1).tolist() == [n == 3 for n in range(6)]
    assert dw.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("V", [300, 5000])
def test_the_error_is_at_most_twice_that_of_plain_pytorch(V, dtype, device):
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter cuts bfloat16 off where a GPU rounds it")
    inputs, targets = operands(64, V, dtype), torch.randint(V, (64,))
    weights = torch.linspace(0, 1, 64) / 64
    found = ours(inputs, targets, weights, device)
    exact = losses_and_gradients(plain, [x.double() for x in inputs], targets, weights)
    # The loss in float32, of the logits that a product in this precision gives.
    theirs = losses_and_gradients(
        lambda *given: F.cross_entropy(F.linear(*given[:3]).float(), given[3], reduction="none"),
        inputs,
        targets,
        weights,
    )
    for name, truth, one, other in zip(NAMES, exact, found, theirs, strict=True):
        error, allowed = ((x.double() - truth).norm() for x in (one, other))
        rounding = 4 * torch.finfo(torch.float32).eps * truth.norm()
        assert error <= 2 * allowed + rounding, f"{name}: {error:.3g}, plain {allowed:.3g}"


def test_two_runs_give_the_same_bits(device):
    inputs, targets = operands(64, 5000), torch.randint(5000, (64,))
    weights = torch.linspace(0, 1, 64)
    one, other = (ours(inputs, targets, weights, device) for _ in range(2))
    for x, y in zip(one, other, strict=True):
        assert torch.equal(x, y)
