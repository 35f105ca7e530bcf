"""The loss that never sees all logits gives what the plain one gives, by kernels too."""

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


def divide(monkeypatch, chunk, least_rows):
    monkeypatch.setattr(nll, "CHUNK", chunk)
    monkeypatch.setattr(nll, "GPU_CHUNK", chunk)
    monkeypatch.setattr(nll, "LEAST_ROWS", least_rows)


@pytest.fixture(params=CHUNKS, ids=str)
def chunks(request, monkeypatch):
    divide(monkeypatch, *request.param)


@pytest.fixture
def kernels(kernel_device, monkeypatch):
    """The device of the kernels; in the interpreter, too, which computes on the CPU."""
    monkeypatch.setattr(nll, "has_kernels", lambda device, dtype: True)
    return kernel_device


def operands(n=N, words=V, dtype=torch.float64, width=E):
    shapes = (n, width), (words, width), (words,)
    return [torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in shapes]


def words(n=N):
    return torch.randint(V, (n,))


def plain(x, weight, bias, targets):
    return F.cross_entropy(F.linear(x, weight, bias), targets, reduction="none")


def losses_and_gradients(loss, inputs, targets, upstream, device="cpu"):
    leaves = [x.detach().to(device, copy=True).requires_grad_() for x in inputs]
    found = loss(*leaves, targets.to(device))
    found.backward(upstream.to(found))
    return [x.cpu() for x in (found.detach(), *(x.grad for x in leaves))]


def assert_same(ours, expected, tolerance=1e-12):
    for name, one, other in zip(NAMES, ours, expected, strict=True):
        other = other.to(one.dtype)
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=f"{name} differ")


def assert_as_exact(ours, theirs, exact):
    for name, truth, one, other in zip(NAMES, exact, ours, theirs, strict=True):
        error, allowed = ((x.double() - truth).norm() for x in (one, other))
        rounding = 4 * torch.finfo(torch.float32).eps * truth.norm()
        assert error <= 2 * allowed + rounding, f"{name}: {error:.3g}, plain {allowed:.3g}"


@pytest.mark.parametrize("ignored", [[], [0], [2, 3, 6], list(range(N))], ids=str)
@pytest.mark.usefixtures("chunks")
def test_losses_and_gradients_are_those_of_cross_entropy(ignored):
    inputs, targets = operands(), words()
    targets[ignored] = nll.IGNORED
    for upstream in UPSTREAM.values():
        found, expected = (
            losses_and_gradients(loss, inputs, targets, upstream) for loss in (linear_nll, plain)
        )
        assert_same(found, expected)
    with torch.no_grad():
        assert torch.equal(linear_nll(*inputs, targets), found[0])


@pytest.mark.parametrize("size", [1, 7, 128, 129, 5000])
def test_those_of_the_kernels_are_those_of_cross_entropy(size, kernels, monkeypatch):
    inputs, targets = operands(N, size, torch.float32), torch.randint(size, (N,))
    targets[:2] = torch.tensor([0, size - 1])
    for rows, upstream in zip((1, 4, 256, 4), UPSTREAM.values(), strict=True):
        divide(monkeypatch, 0, rows)
        found, again = (
            losses_and_gradients(linear_nll, inputs, targets, upstream, kernels) for _ in range(2)
        )
        assert all(map(torch.equal, found, again))
        exact = losses_and_gradients(plain, [x.double() for x in inputs], targets, upstream)
        # Sums in another order, of at most 5,000 exponentials in float32.
        assert_same(found, exact, 1e-5)
        leaves = (x.to(kernels) for x in (*inputs, targets))
        assert torch.equal(linear_nll(*leaves).cpu(), found[0])


def test_of_the_kernels_an_ignored_target_has_no_loss_and_no_gradient(kernels):
    inputs, targets = operands(dtype=torch.float32), words()
    targets[[1, 4]] = nll.IGNORED
    exact = losses_and_gradients(plain, inputs, targets, torch.ones(N))
    # Not by linear_nll, which removes them first on the CPU of the interpreter.
    scale = (targets != nll.IGNORED).float().to(kernels)
    leaves = [x.to(kernels) for x in (*inputs, targets)]
    losses, gradients = nll._pass(*leaves, torch.float32, scale, (True, True, True))
    assert_same([x.cpu() for x in (losses, *gradients)], exact, 1e-5)


@pytest.mark.parametrize("wrong", [V, -1, 10**9])
def test_a_target_outside_the_vocabulary_has_no_loss_by_the_kernels(wrong, kernels):
    targets = words()
    targets[3] = wrong
    inputs = operands(dtype=torch.float32)
    found, dx, dw, _ = losses_and_gradients(linear_nll, inputs, targets, torch.ones(N), kernels)
    assert found.isnan().tolist() == [n == 3 for n in range(N)]
    # So that no update is made of them.
    assert dx.isnan().any(1).tolist() == [n == 3 for n in range(N)]
    assert dw.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [300, 5000])
def test_the_error_of_the_kernels_is_at_most_twice_that_of_pytorch(size, dtype, kernels):
    if dtype == torch.bfloat16 and kernels.type == "cpu":
        pytest.skip("the interpreter cuts bfloat16 off where a GPU rounds it")
    inputs, targets = operands(64, size, dtype), torch.randint(size, (64,))
    weights = torch.linspace(0, 1, 64) / 64

    # The loss in float32, of the logits that a product in this precision gives.
    def rounded(x, weight, bias, targets):
        return F.cross_entropy(F.linear(x, weight, bias).float(), targets, reduction="none")

    found = losses_and_gradients(linear_nll, inputs, targets, weights, kernels)
    theirs = losses_and_gradients(rounded, inputs, targets, weights)
    exact = losses_and_gradients(plain, [x.double() for x in inputs], targets, weights)
    assert_as_exact(found, theirs, exact)


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
    before = [x.clone() for x in inputs]
    for one in UPSTREAM.values():
        gradients = []
        for loss in (linear_nll, plain):
            leaves = [x.detach().requires_grad_() for x in inputs]
            found = loss(*leaves, targets)
            for weights in (one, one, torch.linspace(3, 1, N), torch.ones(N)):
                (*own,) = torch.autograd.grad(found, leaves, weights.double(), retain_graph=True)
            gradients.append([found.detach(), *(x.clone() for x in own)])
            # Who gets a gradient may change it.
            for x in own:
                x.zero_()
            again = torch.autograd.grad(found, leaves, torch.ones(N).double())
            assert_same([found.detach(), *again], gradients[-1])
        assert_same(*gradients)
    assert all(map(torch.equal, inputs, before))


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


def test_a_second_derivative_is_refused_rather_than_wrong():
    inputs = [x.requires_grad_() for x in operands()]
    found = linear_nll(*inputs, words())
    (gradient,) = torch.autograd.grad(found.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def assert_nan_stays_in_its_row(device="cpu", dtype=torch.float64):
    (x, weight, bias), targets = operands(dtype=dtype), words()
    x[2, 1] = math.nan
    found, dx, dw, _ = losses_and_gradients(
        linear_nll, (x, weight, bias), targets, torch.ones(N), device
    )
    assert found.isnan().tolist() == [n == 2 for n in range(N)]
    assert dx.isnan().any(1).tolist() == [n == 2 for n in range(N)]
    assert dw.isnan().all()


def assert_an_impossible_word_has_no_part(device="cpu", dtype=torch.float64, tolerance=1e-12):
    (x, weight, bias), targets = operands(dtype=dtype), words() // 2
    bias[V - 1] = -math.inf
    upstream = torch.ones(N)
    inputs, without = (x, weight, bias), (x, weight[:-1], bias[:-1])
    found, dx, dw, db = losses_and_gradients(linear_nll, inputs, targets, upstream, device)
    assert not dw[-1].any()
    assert not db[-1].any()
    expected = losses_and_gradients(plain, without, targets, upstream)
    assert_same([found, dx, dw[:-1], db[:-1]], expected, tolerance)


@pytest.mark.usefixtures("chunks")
def test_infinities_and_nan_stay_in_their_place():
    assert_nan_stays_in_its_row()
    assert_an_impossible_word_has_no_part()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
def test_by_the_kernels_infinities_and_nan_stay_in_their_place(kernels):
    assert_nan_stays_in_its_row(kernels, torch.float32)
    assert_an_impossible_word_has_no_part(kernels, torch.float32, 1e-5)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_an_upstream_gradient_that_is_no_number_is_handed_on(wrong):
    upstream = torch.ones(N)
    upstream[3] = wrong
    _, dx, dw, _ = losses_and_gradients(linear_nll, operands(), words(), upstream)
    assert dx.isfinite().all(1).tolist() == [n != 3 for n in range(N)]
    assert not dw.isfinite().all()


@pytest.mark.usefixtures("chunks")
def test_a_target_outside_the_vocabulary_is_an_error():
    targets = words()
    for wrong in (V, -1):
        targets[5] = wrong
        with pytest.raises((RuntimeError, IndexError)):
            linear_nll(*operands(), targets)


@pytest.mark.parametrize(
    ("upstream", "half_x", "rows"),
    [("all alike", False, 64), ("all alike", True, 256), ("all different", True, 64)],
)
def test_under_autocast_the_error_is_at_most_twice_that_of_plain_pytorch(
    monkeypatch, upstream, half_x, rows
):
    divide(monkeypatch, 0, rows)
    x, weight, bias = operands(256, 500, torch.float32, width=32)
    # What a projection hands on is in half precision already.
    x = x.bfloat16() if half_x else x
    targets = torch.randint(500, (256,))
    scale = torch.full((256,), 1 / 256) if upstream == "all alike" else torch.linspace(-1, 1, 256)

    def under_autocast(loss):
        with torch.autocast("cpu", torch.bfloat16):
            return losses_and_gradients(loss, (x, weight, bias), targets, scale)

    exact = losses_and_gradients(plain, [y.double() for y in (x, weight, bias)], targets, scale)
    ours = under_autocast(linear_nll)
    assert [y.dtype for y in ours] == [torch.float32, x.dtype, torch.float32, torch.float32]
    assert_as_exact(ours, under_autocast(plain), exact)


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
    divide(monkeypatch, 10_000, 2)
    n, size = 100, 1000
    targets, inputs = torch.randint(size, (n,)), operands(n, size)
    weights = torch.ones(n) if scale == "all alike" else torch.rand(n)
    sizes = []
    for loss in (plain, linear_nll):
        leaves = [x.requires_grad_() for x in inputs]
        with Largest() as largest:
            loss(*leaves, targets).backward(weights.double())
        sizes.append(largest.numel)
    assert sizes == [n * size, 10_000]


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
