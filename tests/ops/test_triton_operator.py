"""The kernels as operators of PyTorch: compilers, layouts and addresses make no difference."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from transformer_xl.ops import rel_attention, use_backend
from transformer_xl.ops import triton as kernels


@pytest.fixture
def device(kernel_device):
    return kernel_device


def operands(device, B=2, T=5, M=6, H=2, K=8):
    S = M + T
    shapes = [(B, T, H, K), (B, S, H, K), (B, S, H, K), (S, H, K), (H, K), (H, K), (S, H)]
    return [torch.randn(shape, device=device) for shape in shapes]


def attend(q, k, v, r, content_bias, position_bias, distance_bias, first_key=None, **options):
    with use_backend("triton"):
        return rel_attention(
            *(q, k, v, r, content_bias, position_bias),
            distance_bias=distance_bias,
            first_key=first_key,
            **options,
        )


def output_and_gradients(function, inputs, **options):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"attn_len": 4}, {"dropout": 0.3}], ids=str)
def test_compiled_code_calls_the_kernels(device, options):
    inputs = operands(device)
    compiled = torch.compile(attend, dynamic=False, fullgraph=True)
    first_key = torch.tensor([0, 3], device=device)
    with torch._inductor.config.patch(fallback_random=True):
        torch.manual_seed(1)
        found = output_and_gradients(compiled, inputs, first_key=first_key, **options)
    torch.manual_seed(1)
    expected = output_and_gradients(attend, inputs, first_key=first_key, **options)
    # What stands around the operators is fused, and may be rounded otherwise.
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.compile
def test_the_choice_of_a_way_can_be_compiled(device, monkeypatch):
    monkeypatch.setattr(kernels, "reason_against", lambda device, dtype, K: None)
    inputs = operands(device)[:6]
    compiled = torch.compile(rel_attention, dynamic=False, fullgraph=True, backend="aot_eager")
    expected = rel_attention(*inputs)
    assert torch.equal(compiled(*inputs), expected)


@pytest.mark.parametrize("has_options", [False, True])
def test_what_compilers_are_told_about_the_operators_is_true(device, has_options):
    q, k, v, r, _, _, distance_bias = operands(device)
    by_content, by_position = q.transpose(1, 2).contiguous(), q.permute(2, 0, 1, 3).contiguous()
    options = (distance_bias, None, None, 11, 0.0)
    if has_options:
        first_key = torch.tensor([[0], [3]], device=device).expand(2, 5)
        options = (None, first_key, torch.tensor([7], device=device), 6, 0.3)
    operation = (by_content, by_position, k, v, r, *options)
    for x in operation[: 5 if has_options else 6]:
        x.requires_grad_()
    torch.library.opcheck(kernels._attend, operation)
    with torch.no_grad():
        out, norms = kernels._attend(*operation)
        tests = ("test_schema", "test_faketensor")
        without_graph = [x.detach() if isinstance(x, torch.Tensor) else x for x in operation]
        gradients = (torch.ones_like(out), norms, out, *without_graph)
        torch.library.opcheck(kernels._gradients_of, gradients, test_utils=tests)


@pytest.mark.compile
def test_a_length_may_change_in_compiled_code(device):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, dynamic=True, fullgraph=True, backend=counter)
    counts = []
    for T in (5, 7, 9):
        inputs = operands(device, T=T)
        assert torch.equal(compiled(*inputs), attend(*inputs))
        counts.append(counter.frame_count)
    assert counts == [counts[0]] * 3


def test_rows_may_lie_further_apart_than_32_bits_count(tmp_path, device):
    if device.type != "cpu":
        pytest.skip("a file with holes is no memory of a GPU")
    q, k, v, r, *biases = operands(device, B=1, H=1, K=16)
    # A file that is nearly all holes: what is not touched takes no room.
    apart = 2**28
    far = torch.from_file(str(tmp_path / "holes"), shared=True, size=len(k[0]) * apart)
    far = far.as_strided((1, 11, 1, 16), (1, apart, 1, 1))
    far.copy_(k)
    with torch.no_grad():
        found = attend(q, far, v, r, *biases)
        assert torch.equal(found, attend(q, k, v, r, *biases))
