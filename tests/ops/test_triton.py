"""The Triton kernels give the numbers of the reference, on a GPU or in Triton's interpreter."""

import subprocess
import sys
from inspect import unwrap

import pytest
import torch

from transformer_xl.ops import reference
from transformer_xl.ops import triton as kernels

NAMES = ("output", "q", "k", "v", "r", "content_bias", "position_bias", "distance_bias")


@pytest.fixture
def device(kernel_device):
    return kernel_device


def divide(monkeypatch, queries, keys):
    monkeypatch.setattr(kernels, "BEFORE_HOPPER", {})
    for kind in kernels.BLOCKS:
        monkeypatch.setitem(kernels.BLOCKS, kind, kernels.Blocks(queries, keys, 4, 1))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    divide(monkeypatch, 16, 16)


def operands(B, T, M, H, K, dtype=torch.float32):
    S = M + T
    shapes = [(B, T, H, K), (B, S, H, K), (B, S, H, K), (S, H, K), (H, K), (H, K), (S, H)]
    # Drawn in one precision: in every other one they are the same numbers, rounded.
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def first_keys(B, M):
    return torch.linspace(M, 0, B).round().long()


def own_first_keys(B, T, M):
    """For each query any key up to its own, as documents make them and in any order."""
    own = torch.arange(M, M + T)
    drawn = (torch.rand(B, T) * (own + 1)).long()
    return torch.where(torch.rand(B, T) < 0.3, own, drawn)


def output_and_gradients(attend, inputs, **options):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*leaves[:6], distance_bias=leaves[6] if len(leaves) > 6 else None, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    out.backward(weights.to(out))
    return [out.detach(), *(x.grad for x in leaves)]


def ours(inputs, device, first_key=None, **options):
    first_key = None if first_key is None else first_key.to(device)
    inputs = [x.to(device) for x in inputs]
    found = output_and_gradients(kernels.rel_attention, inputs, first_key=first_key, **options)
    return [x.cpu() for x in found]


def assert_as_exact_as_the_reference(inputs, device, **options):
    found = ours(inputs, device, **options)
    attend = reference.rel_attention
    exact = output_and_gradients(attend, [x.double() for x in inputs], **options)
    plain = output_and_gradients(attend, inputs, **options)
    for name, truth, one, other in zip(NAMES, exact, found, plain, strict=False):
        assert one.dtype == inputs[0].dtype
        error, allowed = ((x.double() - truth).norm() for x in (one, other))
        # Below the rounding of the result there is no error to compare.
        rounding = torch.finfo(torch.float32).eps * truth.norm()
        assert error <= 2 * allowed + rounding, f"{name}: {error:.3g}, reference {allowed:.3g}"


def assert_equal_to_reference(inputs, device, **options):
    found = ours(inputs, device, **options)
    exact = output_and_gradients(reference.rel_attention, [x.double() for x in inputs], **options)
    for name, truth, one in zip(NAMES, exact, found, strict=False):
        torch.testing.assert_close(
            one, truth.float(), rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.slow
def test_importing_the_backend_loads_no_kernels():
    probe = (
        "import sys, transformer_xl.ops.triton; print([n for n in sys.modules if 'triton' in n])"
    )
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert "'transformer_xl.ops.triton'" in result.stdout, result.stderr
    assert "triton_forward" not in result.stdout


@pytest.mark.parametrize(
    ("shape", "dtype", "attn_len"),
    [
        (shape, dtype, (None, 20)[(row + column) % 2])
        for row, shape in enumerate(
            [(2, 1, 37, 2, 41), (2, 21, 0, 2, 16), (1, 33, 18, 2, 41), (1, 16, 16, 1, 128)]
        )
        for column, dtype in enumerate([torch.float32, torch.float16, torch.bfloat16])
    ],
    ids=str,
)
def test_the_error_is_at_most_twice_that_of_the_reference(shape, attn_len, dtype, device):
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter cuts bfloat16 off where a GPU rounds it")
    assert_as_exact_as_the_reference(operands(*shape, dtype=dtype), device, attn_len=attn_len)


@pytest.mark.parametrize(
    ("shape", "attn_len", "some_are_shorter", "has_bias"),
    [
        (shape, attn_len, (row + column) % 2 == 0, (row // 2 + column) % 2 == 0)
        for row, shape in enumerate(
            [(1, 1, 0, 1, 1), (2, 1, 19, 1, 16), (2, 19, 0, 1, 16), (3, 18, 15, 1, 8)]
        )
        for column, attn_len in enumerate([None, 2, 17])
    ],
    ids=str,
)
def test_no_combination_of_masks_is_special(shape, attn_len, some_are_shorter, has_bias, device):
    B, _, M, _, _ = shape
    assert_equal_to_reference(
        operands(*shape)[: 7 if has_bias else 6],
        device,
        attn_len=attn_len,
        first_key=first_keys(B, M) if some_are_shorter else None,
    )


@pytest.mark.parametrize("attn_len", [None, 9])
@pytest.mark.parametrize(
    "shape", [(2, 1, 19, 1, 16), (2, 35, 0, 1, 16), (2, 37, 30, 1, 8)], ids=str
)
def test_each_query_may_have_a_first_key_of_its_own(shape, attn_len, device):
    B, T, M, _, _ = shape
    for first_key in (own_first_keys(B, T, M), own_first_keys(B, T, M).cummax(1).values):
        assert_equal_to_reference(operands(*shape), device, attn_len=attn_len, first_key=first_key)


def test_documents_that_begin_in_the_segment_do_not_read_what_lies_before_them(device):
    inputs = operands(1, 33, 20, 1, 16)
    # Two documents, one that began in the memory and one that begins with the query 5.
    first_key = torch.full((1, 33), 17)
    first_key[:, 5:] = 25
    expected = ours(inputs, device, first_key=first_key)
    for x in inputs[1:3]:
        x[:, :17] = torch.nan
    found = ours(inputs, device, first_key=first_key)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert not found[2][:, :17].any()


@pytest.mark.parametrize("blocks", [(16, 32), (32, 32), (16, 64)], ids=str)
@pytest.mark.parametrize(("T", "M"), [(15, 33), (16, 0), (17, 16), (33, 1), (49, 48)])
def test_no_length_around_the_blocks_is_special(T, M, blocks, device, monkeypatch):
    divide(monkeypatch, *blocks)
    options = {"attn_len": 30, "first_key": first_keys(1, M // 2)}
    assert_equal_to_reference(operands(1, T, M, 1, 16), device, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("K", [32, 41, 64, 96, 128])
def test_the_blocks_of_a_gpu_are_as_exact(K, dtype, device, monkeypatch):
    monkeypatch.undo()
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter cuts bfloat16 off where a GPU rounds it")
    assert_as_exact_as_the_reference(
        operands(2, 70, 67, 1, K, dtype=dtype), device, attn_len=90, first_key=first_keys(2, 40)
    )


def test_positions_get_their_gradient_from_all_streams(device):
    assert_equal_to_reference(operands(5, 3, 9, 1, 16), device, first_key=first_keys(5, 9))


def test_a_query_that_sees_one_key_passes_nothing_through_its_weight(device):
    inputs = operands(2, 19, 5, 2, 16)
    out, dq, dk, dv, *others = ours(inputs, device, attn_len=1)
    # A GPU multiplies and subtracts in one step, so the only weight is 1 but for its rounding.
    torch.testing.assert_close(out, inputs[2][:, 5:], rtol=1e-6, atol=0)
    assert dv[:, 5:].norm() > 1
    assert not dv[:, :5].any()
    # Differences of sums that are equal but for the order in which they are added up.
    for gradient in (dq, dk, *others):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-5)


def test_a_length_beyond_all_keys_hides_nothing(device):
    inputs = operands(1, 5, 7, 1, 16)
    for one, other in zip(ours(inputs, device), ours(inputs, device, attn_len=2**40), strict=True):
        assert torch.equal(one, other)


def test_what_lies_before_the_first_key_of_a_stream_is_not_read(device):
    inputs = operands(2, 18, 20, 1, 16)
    first_key = torch.tensor([0, 17])
    expected = ours(inputs, device, first_key=first_key)
    for x in inputs[1:3]:
        x[1, :17] = torch.nan
    found = ours(inputs, device, first_key=first_key)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert not found[2][1, :17].any()
    assert not found[3][1, :17].any()


@pytest.mark.parametrize("T", [1, 19])
def test_the_layout_of_the_inputs_does_not_matter(T, device):
    inputs = operands(2, T, 6, 3, 8)
    # As a memory keeps its keys (heads first, in a longer room), reversed, with gaps, expanded.
    room = torch.full((3, 2, T + 12, 8), torch.nan)[:, :, 3 : T + 9]
    strided = [
        inputs[0].transpose(0, 1).contiguous().transpose(0, 1),
        room.copy_(inputs[1].permute(2, 0, 1, 3)).permute(1, 2, 0, 3),
        torch.full((2, T + 6, 3, 16), torch.nan)[..., ::2].copy_(inputs[2]),
        inputs[3].permute(1, 2, 0).contiguous().permute(2, 0, 1),
        inputs[4][:1].expand(3, 8),
        inputs[5].T.contiguous().T,
        inputs[6].T.contiguous().T,
    ]
    inputs[4] = strided[4].contiguous()

    weights = torch.randn(2, 3, 8, T)

    def attend(inputs, d_out):
        leaves = [x.to(device).requires_grad_() for x in inputs]
        out = kernels.rel_attention(*leaves[:6], distance_bias=leaves[6], attn_len=15)
        return [out, *torch.autograd.grad(out, leaves, d_out.to(device))]

    d_out = weights.permute(0, 3, 1, 2)
    found, expected = attend(strided, d_out), attend(inputs, d_out.contiguous())
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_some_inputs_may_need_no_gradient(device):
    inputs = [x.to(device) for x in operands(1, 5, 4, 2, 8)[:6]]
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(kernels.rel_attention(*leaves).square().sum(), leaves)
    assert not kernels.rel_attention(*inputs).requires_grad
    for n in range(6):
        leaf = inputs[n].clone().requires_grad_()
        mixed = [leaf if n == place else x for place, x in enumerate(inputs)]
        (found,) = torch.autograd.grad(kernels.rel_attention(*mixed).square().sum(), leaf)
        assert torch.equal(found, expected[n])


def test_the_inputs_are_left_as_they_were(device):
    inputs = [x.to(device).requires_grad_() for x in operands(2, 5, 3, 2, 8)[:6]]
    before = [x.detach().clone() for x in inputs]
    first_key = torch.tensor([0, 2], device=device)
    kernels.rel_attention(*inputs, first_key=first_key, dropout=0.5).sum().backward()
    for x, y in zip(inputs, before, strict=True):
        assert torch.equal(x, y)


def test_two_runs_give_the_same_bits(device):
    inputs = operands(3, 17, 4, 1, 16, dtype=torch.float16)
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append(ours(inputs, device, first_key=first_keys(3, 4), dropout=0.2))
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


def kept_weights(inputs, device, dropout, seed):
    """The weights with and without dropout: values that are unit vectors bring them out."""
    B, S, H, _ = inputs[2].shape
    inputs = [x.to(device) for x in inputs[:6]]
    inputs[2] = torch.eye(S, device=device)[None, :, None].expand(B, -1, H, -1)
    torch.manual_seed(seed)
    return (kernels.rel_attention(*inputs, dropout=p).cpu() for p in (dropout, 0.0))


def test_dropout_hides_single_weights_and_scales_the_others(device):
    B, T, H, S, p = 4, 16, 3, 64, 0.25
    dropped, weights = kept_weights(operands(B, T, S - T, H, S), device, p, seed=3)
    is_seen = reference.hidden_keys(T, S, None, dropped.device).logical_not()[:, None]
    is_kept = (dropped != 0)[is_seen.expand_as(dropped)]
    torch.testing.assert_close(dropped[dropped != 0], (weights / (1 - p))[dropped != 0])
    # Five standard deviations of a share.
    assert abs(is_kept.float().mean() - (1 - p)) < 5 * (p * (1 - p) / is_kept.numel()) ** 0.5
    # Neighbours of each kind, in the memory that all queries see, share no chance.
    memory = dropped[..., : S - T] != 0
    for axis in range(4):
        n = memory.shape[axis] - 1
        both = memory.narrow(axis, 0, n) & memory.narrow(axis, 1, n)
        share = (1 - p) ** 2
        # Pairs overlap, which makes their share vary up to three times as much.
        deviation = (3 * share * (1 - share) / both.numel()) ** 0.5
        assert abs(both.float().mean() - share) < 5 * deviation
    again, _ = kept_weights(operands(B, T, S - T, H, S), device, p, seed=4)
    assert not torch.equal(again != 0, dropped != 0)


def test_dropout_changes_nothing_on_the_average(device):
    inputs = [x.to(device) for x in operands(1, 2, 6, 1, 8)[:6]]
    exact = kernels.rel_attention(*inputs)
    runs = torch.stack([kernels.rel_attention(*inputs, dropout=0.3) for _ in range(100)])
    error = runs.std(0) / len(runs) ** 0.5
    assert ((runs.mean(0) - exact).abs() < 5 * error).all()


@pytest.mark.parametrize("blocks", [(16, 16), (16, 32), (32, 32)], ids=str)
def test_dropout_gradients_are_those_of_what_was_computed(blocks, device, monkeypatch):
    B, T, M, H, p = 2, 21, 11, 2, 0.375
    # As wide as there are keys, so that values can be unit vectors.
    inputs = operands(B, T, M, H, K=T + M)
    dropped, _ = kept_weights(inputs, device, p, seed=9)
    # The mask is the same whatever the values are and however the work is divided.
    kept = (dropped != 0).permute(0, 2, 1, 3) / (1 - p)
    monkeypatch.setattr(reference.F, "dropout", lambda weight, p: weight * kept.to(weight))
    divide(monkeypatch, *blocks)

    def attend(*inputs, **options):
        torch.manual_seed(9)
        return kernels.rel_attention(*inputs, dropout=p, **options)

    found = output_and_gradients(attend, [x.to(device) for x in inputs])
    exact = output_and_gradients(reference.rel_attention, [x.double() for x in inputs], dropout=p)
    for name, one, truth in zip(NAMES, found, exact, strict=True):
        error = (one.cpu().double() - truth).norm() / truth.norm()
        assert error < 1e-5, f"{name}: {error:.3g}"


def test_all_weights_may_be_dropped(device):
    for found in ours(operands(1, 3, 4, 1, 8), device, dropout=1.0):
        assert not found.any()


def test_a_second_derivative_is_refused_rather_than_wrong(device):
    inputs = [x.to(device).requires_grad_() for x in operands(1, 3, 2, 1, 8)[:6]]
    out = kernels.rel_attention(*inputs)
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        gradient.sum().backward()


def test_a_missing_triton_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install triton"):
        kernels.rel_attention(*operands(1, 2, 2, 1, 8)[:6])


def test_what_the_kernels_cannot_compute_is_named(device):
    inputs = [x.to(device) for x in operands(1, 2, 2, 1, 8)[:6]]
    attend = unwrap(kernels.rel_attention)
    with pytest.raises(ValueError, match="computes float16, bfloat16 or float32"):
        attend(*[x.double() for x in inputs])
    with pytest.raises(ValueError, match=r"float32 queries, torch\.float16 keys"):
        attend(inputs[0], inputs[1].half(), *inputs[2:])
    with pytest.raises(ValueError, match="width 129: the triton backend computes up to 128"):
        attend(*[x.to(device) for x in operands(1, 2, 2, 1, 129)[:6]])


def test_a_processor_without_the_interpreter_is_named(monkeypatch):
    monkeypatch.setattr(kernels, "find_spec", lambda name: True)
    monkeypatch.setattr(kernels, "_is_interpreted", lambda: False)
    with pytest.raises(ValueError, match="tensors on cpu: the triton backend needs a CUDA device"):
        kernels.rel_attention(*operands(1, 2, 2, 1, 8)[:6])
