import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_xl.model import TransformerXL
from transformer_xl.ops import linear, products, skew


@pytest.fixture
def onednn(monkeypatch):
    """Leave every product to oneDNN, whatever the processor and however small it is."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "LEAST_ROWS", 1)
    monkeypatch.setattr(products, "LEAST_WORK", 1)


def operands(shape=(3, 5, 24)):
    x = torch.randn(*shape, requires_grad=True)
    weight, bias = torch.randn(16, 24, requires_grad=True), torch.randn(16, requires_grad=True)
    return x, weight, bias


def error(found, exact):
    return (found.double() - exact).abs().max().item()


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 24), (7, 24), (1, 1, 24), (2, 0, 24)])
def test_values_and_gradients_are_those_of_torch_to_twice_its_error(onednn, shape, with_bias):
    leaves = operands(shape)
    leaves = leaves if with_bias else (*leaves[:2], None)

    def run(function, dtype):
        own = [None if x is None else x.detach().to(dtype).requires_grad_() for x in leaves]
        out = function(*own)
        (out * torch.arange(16, dtype=dtype)).sum().backward()
        return [out, *(x.grad for x in own if x is not None)]

    exact = run(F.linear, torch.float64)
    theirs, ours = run(F.linear, torch.float32), run(linear, torch.float32)
    for one, other, right in zip(ours, theirs, exact, strict=True):
        if right.numel():
            assert error(one, right) <= 2 * error(other, right) + 1e-6 * right.abs().max().item()


def test_operands_may_be_transposed_or_slices(onednn):
    x, weight = torch.randn(24, 8).T, torch.randn(32, 48)[4:20, ::2]
    torch.testing.assert_close(linear(x, weight, None), x @ weight.T)
    torch.testing.assert_close(products.product(x, weight.T), x @ weight.T)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_stay_with_torch(onednn, dtype):
    x, weight, _ = operands()
    assert not products.takes_onednn(x.to(dtype), weight.to(dtype))


@pytest.mark.parametrize("shape", [(3, 5, 24), (24,), (0, 24)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_torchs(onednn, dtype, shape):
    leaves = operands(shape)

    def run(function):
        own = [x.detach().requires_grad_() for x in leaves]
        with torch.autocast("cpu", dtype):
            out = function(*own)
        (out.float() * torch.arange(16)).sum().backward()
        return [out, *(x.grad for x in own)]

    for one, other in zip(run(linear), run(F.linear), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)


def test_a_backward_pass_under_autocast_keeps_the_precision_of_the_forward_pass(onednn):
    def gradients(autocast):
        torch.manual_seed(0)
        leaves = operands()
        out = linear(*leaves)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out.square().sum().backward()
        return [x.grad for x in leaves]

    for one, other in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(one, other)


def test_under_autocast_no_second_copy_of_the_weight_is_kept():
    leaves = operands()
    sizes = []
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(
            lambda x: sizes.append((x.shape, x.dtype)) or x, lambda x: x
        ),
    ):
        linear(*leaves)
    assert {shape[0]: dtype for shape, dtype in sizes if len(shape) == 2} == {16: torch.float32}


def test_the_setting_for_batches_comes_back_when_the_last_block_ends(onednn, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    first, second = products.onednn(True), products.onednn(True)
    first.__enter__()
    second.__enter__()
    assert setting.fp32_precision == "bf16"
    first.__exit__(None, None, None)
    assert setting.fp32_precision == "bf16"
    second.__exit__(None, None, None)
    assert setting.fp32_precision == before
    with pytest.raises(KeyError), products.onednn(True):
        raise KeyError
    assert setting.fp32_precision == before


@pytest.fixture
def emulated(monkeypatch):
    """As on a processor that does not compute in bfloat16."""
    monkeypatch.setattr(products, "has_bfloat16", lambda: False)


def test_emulated_products_are_float32_products_of_rounded_operands(emulated):
    x, weight, bias = (operand.detach().bfloat16() for operand in operands((3, 40, 24)))
    exact = F.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(linear(x, weight, bias), exact.bfloat16(), rtol=0, atol=0)
    rows = x.flatten(0, 1)
    expected = (rows.float() @ weight.float().T).bfloat16()
    out = torch.empty_like(expected)
    assert products.product(rows, weight.T, out=out) is out
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(products.product(rows, weight.T), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_emulated_attention_keeps_its_operands_as_they_are(emulated, dropout):
    shapes = [*3 * [(2, 40, 2, 8)], (40, 2, 8), *2 * [(2, 8)], (40, 2)]
    own = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    kept = []

    def gradients(leaves, dtype):
        *operands, distance_bias = (leaf.to(dtype) for leaf in leaves)
        # The same numbers for dropout.
        torch.manual_seed(0)
        out = skew.rel_attention(*operands, distance_bias=distance_bias, dropout=dropout)
        out = out.bfloat16()
        return torch.autograd.grad(out.float().square().sum(), leaves)

    expected = gradients(own, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        found = gradients(own, torch.bfloat16)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    places = {x.untyped_storage().data_ptr() for x in kept}
    assert {x.untyped_storage().data_ptr() for x in own} <= places
    # That of the square above.
    assert sum(x.dtype == torch.float32 for x in kept) == 1


class Dtypes(TorchDispatchMode):
    """Notes the precisions of products."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(name in str(function) for name in ("mm", "linear", "attention")):
            self.seen |= {x.dtype for x in args if isinstance(x, torch.Tensor)}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("learns", [False, True])
def test_a_whole_model_emulates_no_product(emulated, tiny_config, learns):
    torch.manual_seed(0)
    model = TransformerXL(tiny_config)
    tokens = torch.randint(tiny_config.vocab_size, (2, 5))
    with Dtypes() as dtypes, torch.set_grad_enabled(learns), torch.autocast("cpu", torch.bfloat16):
        out = model(tokens, None, tokens)
        if learns:
            out.loss.backward()
        else:
            assert model(tokens, out.mems).log_probs.isfinite().all()
    assert dtypes.seen == {torch.float32}


@pytest.mark.compile
def test_bfloat16_compiles_whole(emulated):
    weight, x = torch.randn(8, 8).bfloat16(), torch.randn(2, 3, 8).bfloat16()
    # Without the checks of signatures, which a graph cannot hold.
    compiled = torch.compile(inspect.unwrap(linear), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight, None), F.linear(x, weight))
