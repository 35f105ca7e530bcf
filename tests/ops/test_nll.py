"""The loss that never sees all logits gives what the plain one gives."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_xl.ops import linear_nll, nll

NAMES = ("losses", "x", "weight", "bias")
N, E, V = 7, 3, 11
# Logits of a chunk, least rows: all at once; each token alone; two with a rest of one; all but
# one; chunks as long as the text; three by the number of logits.
CHUNKS = [(16 << 20, 256), (0, 1), (0, 2), (0, 6), (0, 7), (3 * V + 1, 1)]
UPSTREAM = {
    "all alike": torch.full((N,), 0.3),
    "all different": torch.linspace(-1, 2, N),
    "one alone": torch.arange(N) == 4,
    "nothing": torch.zeros(N),
}


@pytest.fixture(params=CHUNKS, ids=str)
def chunks(request, monkeypatch):
    monkeypatch.setattr(nll, "CHUNK", request.param[0])
    monkeypatch.setattr(nll, "LEAST_ROWS", request.param[1])


def operands(n=N, dtype=torch.float64):
    return [torch.randn(*shape, dtype=dtype) for shape in ((n, E), (V, E), (V,))]


def words(n=N):
    return torch.randint(V, (n,))


def plain(x, weight, bias, targets):
    return F.cross_entropy(F.linear(x, weight, bias), targets, reduction="none")


def losses_and_gradients(loss, inputs, targets, upstream):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    found = loss(*leaves, targets)
    found.backward(upstream.to(found.dtype))
    return [found.detach(), *(x.grad for x in leaves)]


def assert_same(ours, expected, tolerance=1e-12):
    for name, one, other in zip(NAMES, ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance, msg=f"{name} differ")


@pytest.mark.usefixtures("chunks")
def test_losses_and_gradients_are_those_of_cross_entropy():
    inputs, targets = operands(), words()
    for upstream in UPSTREAM.values():
        found, expected = (
            losses_and_gradients(loss, inputs, targets, upstream) for loss in (linear_nll, plain)
        )
        assert_same(found, expected)


def test_no_tokens_have_no_losses_and_gradients_of_zero():
    inputs = [x.requires_grad_() for x in operands(0)]
    found = linear_nll(*inputs, words(0))
    assert found.shape == (0,)
    found.sum().backward()
    assert [x.grad.shape for x in inputs] == [(0, E), (V, E), (V,)]
    assert not any(x.grad.any() for x in inputs)


@pytest.mark.usefixtures("chunks")
def test_a_graph_that_is_kept_can_be_gone_through_again():
    inputs, targets = operands(), words()
    other = torch.linspace(3, 1, N).double()
    for one in UPSTREAM.values():
        gradients = []
        for loss in (linear_nll, plain):
            leaves = [x.detach().clone().requires_grad_() for x in inputs]
            found = loss(*leaves, targets)
            for weights in (one.double(), one.double(), other, torch.ones(N).double()):
                found.backward(weights, retain_graph=True)
            gradients.append([found.detach(), *(x.grad for x in leaves)])
        assert_same(*gradients)


def test_who_gets_a_gradient_may_change_it():
    inputs, targets = [x.requires_grad_() for x in operands()], words()
    total = linear_nll(*inputs, targets).sum()
    first = torch.autograd.grad(total, inputs, retain_graph=True)
    before = [x.clone() for x in first]
    for gradient in first:
        gradient.zero_()
    for again, expected in zip(torch.autograd.grad(total, inputs), before, strict=True):
        torch.testing.assert_close(again, expected)


@pytest.mark.parametrize("upstream", ["all alike", "all different"])
def test_some_operands_may_need_no_gradient(upstream):
    for learning in product([False, True], repeat=3):
        inputs, targets = operands(), words()
        expected = losses_and_gradients(plain, inputs, targets, UPSTREAM[upstream])
        for x, learns in zip(inputs, learning, strict=True):
            x.requires_grad_(learns)
        found = linear_nll(*inputs, targets)
        torch.testing.assert_close(found.detach(), expected[0])
        assert found.requires_grad == any(learning)
        if any(learning):
            found.backward(UPSTREAM[upstream].double())
        for x, learns, gradient in zip(inputs, learning, expected[1:], strict=True):
            assert (x.grad is not None) == learns, learning
            if learns:
                torch.testing.assert_close(x.grad, gradient, msg=f"{learning}")


@pytest.mark.usefixtures("chunks")
def test_gradients_are_those_of_what_was_computed():
    inputs, targets = [x.requires_grad_() for x in operands()], words()
    assert torch.autograd.gradcheck(lambda *inputs: linear_nll(*inputs, targets), inputs)


def test_a_second_derivative_is_refused_rather_than_wrong():
    inputs = [x.requires_grad_() for x in operands()]
    found = linear_nll(*inputs, words())
    (gradient,) = torch.autograd.grad(found.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.usefixtures("chunks")
def test_without_gradients_the_losses_are_the_same():
    inputs, targets = [x.requires_grad_() for x in operands()], words()
    expected = linear_nll(*inputs, targets)
    for switch in (torch.no_grad, torch.inference_mode):
        with switch():
            found = linear_nll(*inputs, targets)
        assert not found.requires_grad
        assert torch.equal(found, expected)


@pytest.mark.usefixtures("chunks")
def test_the_operands_are_left_as_they_were():
    inputs, targets = [x.requires_grad_() for x in operands()], words()
    before = [x.detach().clone() for x in (*inputs, targets)]
    linear_nll(*inputs, targets).sum().backward()
    for x, y in zip((*inputs, targets), before, strict=True):
        assert torch.equal(x, y)


@pytest.mark.usefixtures("chunks")
def test_what_is_no_number_stays_none_and_in_its_place():
    (x, weight, bias), targets = operands(), words()
    x[2, 1] = math.nan
    found, *gradients = losses_and_gradients(linear_nll, (x, weight, bias), targets, torch.ones(N))
    assert found.isnan().tolist() == [n == 2 for n in range(N)]
    assert gradients[0].isnan().any(1).tolist() == [n == 2 for n in range(N)]
    assert gradients[1].isnan().all()
    weight[targets[0], 0] = math.nan
    assert linear_nll(x, weight, bias, targets).isnan().all()


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_an_upstream_gradient_that_is_no_number_is_handed_on(wrong):
    upstream = torch.ones(N)
    upstream[3] = wrong
    _, dx, dw, _ = losses_and_gradients(linear_nll, operands(), words(), upstream)
    assert dx.isfinite().all(1).tolist() == [n != 3 for n in range(N)]
    assert not dw.isfinite().all()


@pytest.mark.usefixtures("chunks")
def test_a_word_that_cannot_be_has_no_part_in_anything():
    (x, weight, bias), targets = operands(), words() // 2
    bias[V - 1] = -math.inf
    found, dx, dw, db = losses_and_gradients(linear_nll, (x, weight, bias), targets, torch.ones(N))
    without = (x, weight[:-1], bias[:-1])
    expected = losses_and_gradients(plain, without, targets, torch.ones(N))
    assert not dw[-1].any()
    assert not db[-1].any()
    assert_same([found, dx, dw[:-1], db[:-1]], expected)


@pytest.mark.usefixtures("chunks")
def test_a_target_outside_the_vocabulary_is_an_error():
    targets = words()
    for wrong in (V, -1):
        targets[5] = wrong
        with pytest.raises((RuntimeError, IndexError)):
            linear_nll(*operands(), targets)


@pytest.mark.parametrize("upstream", ["all alike", "all different"])
@pytest.mark.parametrize("half_x", [False, True])
@pytest.mark.parametrize("rows", [64, 256])
def test_under_autocast_the_error_is_at_most_twice_that_of_plain_pytorch(
    monkeypatch, upstream, half_x, rows
):
    monkeypatch.setattr(nll, "CHUNK", 0)
    monkeypatch.setattr(nll, "LEAST_ROWS", rows)
    x, weight, bias = torch.randn(256, 32), torch.randn(500, 32), torch.randn(500)
    # What a projection hands on is in half precision already.
    x = x.bfloat16() if half_x else x
    targets = torch.randint(500, (256,))
    scale = torch.full((256,), 1 / 256) if upstream == "all alike" else torch.linspace(-1, 1, 256)

    def under_autocast(loss):
        with torch.autocast("cpu", torch.bfloat16):
            return losses_and_gradients(loss, (x, weight, bias), targets, scale)

    exact = losses_and_gradients(
        plain, [y.double() for y in (x, weight, bias)], targets, scale.double()
    )
    ours, theirs = under_autocast(linear_nll), under_autocast(plain)
    assert ours[0].dtype == torch.float32
    assert [y.dtype for y in ours[1:]] == [x.dtype, torch.float32, torch.float32]
    for name, truth, one, other in zip(NAMES, exact, ours, theirs, strict=True):
        error, allowed = ((y.double() - truth).norm() for y in (one, other))
        assert error <= 2 * allowed, f"{name}: {error:.3g}, plain {allowed:.3g}"


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that was made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, list | tuple) else [out]:
            self.numel = max(self.numel, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


@pytest.mark.parametrize("scale", ["all alike", "all different"])
def test_no_table_of_all_logits_is_made(monkeypatch, scale):
    monkeypatch.setattr(nll, "CHUNK", 10_000)
    monkeypatch.setattr(nll, "LEAST_ROWS", 2)
    n, words, width = 100, 1000, 4
    targets = torch.randint(words, (n,))
    inputs = [torch.randn(shape).requires_grad_() for shape in ((n, width), (words, width), words)]
    weights = torch.ones(n) if scale == "all alike" else torch.rand(n)
    sizes = []
    for loss in (plain, linear_nll):
        with Largest() as largest:
            loss(*inputs, targets).backward(weights)
        sizes.append(largest.numel)
    assert sizes == [n * words, 10_000]


@pytest.mark.compile
@pytest.mark.slow
def test_compiled_it_is_the_same():
    inputs, targets = operands(), words()
    compiled = torch.compile(linear_nll, fullgraph=True)
    found, expected = (
        losses_and_gradients(loss, inputs, targets, UPSTREAM["all different"])
        for loss in (compiled, plain)
    )
    assert_same(found, expected, 1e-10)


@pytest.mark.parametrize("places", [[0], [2, 3, 6], list(range(N))], ids=str)
@pytest.mark.usefixtures("chunks")
def test_a_target_of_minus_100_is_ignored(places):
    parts, targets = operands(), words()
    targets[places] = -100
    for upstream in UPSTREAM.values():
        found, expected = (
            losses_and_gradients(loss, parts, targets, upstream) for loss in (linear_nll, plain)
        )
        assert_same(found, expected)
        assert not found[0][places].any()
    with torch.no_grad():
        assert not linear_nll(*parts, targets)[places].any()
