"""Whatever is faster than the reference gives the numbers of the reference.

On a CPU and, where there is Triton, its kernels on a GPU or in the interpreter.
"""

import itertools
from collections import Counter
from importlib.util import find_spec
from inspect import unwrap
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_xl.ops import attention, reference, rel_attention, skew, use_backend
from transformer_xl.ops import triton as kernels

NAMES = ("output", "q", "k", "v", "r", "content_bias", "position_bias", "distance_bias")
# Streams, queries, remembered, heads, width.
SHAPES = [(1, 1, 0, 1, 1), (2, 1, 19, 3, 4), (2, 19, 0, 3, 5), (3, 18, 15, 2, 3), (1, 9, 3, 3, 2)]
# Most queries of a block, bytes of a group: one block and group; blocks with a rest of one, of
# two; every head alone; three heads as two and one.
BLOCKS = [(128, 2 << 20), (4, 2 << 20), (3, 2 << 20), (2, 1), (3, 2 * 2 * 3 * 14 * 8)]
ATTN_LENS = [None, 1, 2, 17, 100]
# A Latin square: each pair of a shape, a size of blocks and an attention length.
PAIRS = [
    (shape, blocks, ATTN_LENS[(row + column) % 5])
    for row, shape in enumerate(SHAPES)
    for column, blocks in enumerate(BLOCKS)
]


class Backend(NamedTuple):
    """A backend and what it computes."""

    attend: Any
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float64
    error: float = 1e-12
    """Largest difference from the reference in float64."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    """Precisions in which its error is at most twice that of the reference."""

    def __call__(self, *inputs, first_key=None, **options):
        """Attend on the device; an input after the biases u and v is that of the distances."""
        bias = inputs[6] if len(inputs) > 6 else None
        first_key = None if first_key is None else first_key.to(self.device)
        return self.attend(*inputs[:6], distance_bias=bias, first_key=first_key, **options)

    def output_and_gradients(self, inputs, **options):
        """Return the output and the gradient of each input, in float64 on the CPU."""
        leaves = [x.detach().to(self.device, copy=True).requires_grad_() for x in inputs]
        out = self(*leaves, **options)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        out.backward(weights.to(out))
        return [x.detach().cpu().double() for x in (out, *(x.grad for x in leaves))]


REFERENCE = Backend(reference.rel_attention)


def kernels_on(device, monkeypatch):
    """Return the Triton kernels, on a GPU or in the interpreter, in small blocks."""
    if find_spec("triton") is None:
        pytest.skip("needs Triton: pip install triton, in the version that belongs to the PyTorch")
    from triton import knobs

    if knobs.runtime.interpret == (device == "cuda"):
        pytest.skip("runs in Triton's interpreter with TRITON_INTERPRET=1, on a GPU without it")
    divide_kernels(monkeypatch, 16, 16)
    # The interpreter cuts bfloat16 off where a GPU rounds it.
    dtypes = (torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else []))
    return Backend(kernels.rel_attention, torch.device(device), torch.float32, 1e-5, dtypes)


def divide_kernels(monkeypatch, queries, keys):
    monkeypatch.setattr(kernels, "BEFORE_HOPPER", {})
    for kind in kernels.BLOCKS:
        monkeypatch.setitem(kernels.BLOCKS, kind, kernels.Blocks(queries, keys, 4, 1))


def divide(monkeypatch, blocks):
    monkeypatch.setattr(skew, "QUERY_BLOCK", blocks[0])
    monkeypatch.setattr(skew, "GROUP_BYTES", blocks[1])


@pytest.fixture(params=["skew", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request, monkeypatch):
    """Each backend that is faster than the reference."""
    if request.param == "skew":
        return Backend(skew.rel_attention)
    return kernels_on("cpu" if request.param == "interpreter" else "cuda", monkeypatch)


def operands(B, T, M, H, K, dtype=torch.float64):
    S = M + T
    shapes = [(B, T, H, K), (B, S, H, K), (B, S, H, K), (S, H, K), (H, K), (H, K), (S, H)]
    # Drawn in one precision: in every other one they are the same numbers, rounded.
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def assert_equal_to_reference(backend, inputs, **options):
    inputs = [x.to(backend.dtype) for x in inputs]
    found = backend.output_and_gradients(inputs, **options)
    expected = REFERENCE.output_and_gradients([x.double() for x in inputs], **options)
    for name, one, other in zip(NAMES, found, expected, strict=False):
        close = {"rtol": backend.error, "atol": backend.error}
        torch.testing.assert_close(one, other, **close, msg=lambda text, n=name: f"{n}: {text}")


def assert_as_exact_as_the_reference(backend, inputs, **options):
    exact = REFERENCE.output_and_gradients([x.double() for x in inputs], **options)
    plain = REFERENCE.output_and_gradients(inputs, **options)
    found = backend.output_and_gradients(inputs, **options)
    for name, truth, one, other in zip(NAMES, exact, found, plain, strict=False):
        error, allowed = ((x - truth).norm() for x in (one, other))
        # Below the rounding of the result there is no error to compare.
        rounding = torch.finfo(torch.float32).eps * truth.norm()
        assert error <= 2 * allowed + rounding, f"{name}: {error:.3g}, reference {allowed:.3g}"


def first_keys(B, M):
    return torch.linspace(M, 0, B).round().long()


def own_first_keys(B, T, M):
    """For each query any key up to its own, which some of them begin with."""
    own = torch.arange(M, M + T)
    drawn = (torch.rand(B, T) * (own + 1)).long()
    return torch.where(torch.rand(B, T) < 0.3, own, drawn)


def test_memory_nobody_wrote_reads_as_nan_in_this_folder():
    assert torch.empty(3).isnan().all()


@pytest.mark.parametrize(("shape", "blocks", "attn_len"), PAIRS, ids=str)
def test_output_and_gradients_are_those_of_the_reference(
    backend, shape, blocks, attn_len, monkeypatch
):
    divide(monkeypatch, blocks)
    B, T, M, _, _ = shape
    inputs = operands(*shape)
    masks = (None, first_keys(B, M), own_first_keys(B, T, M))
    for first_key, n in itertools.product(masks, (6, 7)):
        assert_equal_to_reference(backend, inputs[:n], attn_len=attn_len, first_key=first_key)


@pytest.mark.parametrize("attn_len", [None, 30, 140])
@pytest.mark.parametrize(("T", "M"), [(15, 33), (16, 0), (33, 1), (127, 20), (128, 20), (257, 20)])
def test_no_length_around_the_blocks_is_special(backend, T, M, attn_len):
    options = {"attn_len": attn_len, "first_key": first_keys(1, M // 2)}
    assert_equal_to_reference(backend, operands(1, T, M, 1, 16), **options)


@pytest.mark.parametrize("attn_len", [None, 1, 30, 150])
@pytest.mark.parametrize(
    "shape", [(16, 1, 67, 2, 41), (2, 37, 0, 2, 16), (2, 53, 41, 3, 8), (1, 301, 99, 2, 128)]
)
def test_the_error_is_at_most_twice_that_of_the_reference(backend, shape, attn_len):
    options = {"attn_len": attn_len, "first_key": first_keys(shape[0], shape[2])}
    for dtype in backend.dtypes:
        assert_as_exact_as_the_reference(backend, operands(*shape, dtype=dtype)[:6], **options)


@pytest.mark.parametrize("K", [32, 41, 64, 96, 128])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_blocks_of_a_gpu_are_as_exact(K, device, monkeypatch):
    backend = kernels_on(device, monkeypatch)
    monkeypatch.undo()
    for dtype in backend.dtypes:
        inputs = operands(2, 70, 67, 1, K, dtype=dtype)
        options = {"attn_len": 90, "first_key": first_keys(2, 40)}
        assert_as_exact_as_the_reference(backend, inputs, **options)


def test_what_no_query_sees_is_not_read(backend):
    T, M = 18, 20
    of_stream, of_queries = torch.tensor([0, 17]), torch.full((2, T), 17)
    # A document that began in the memory, and one that begins with the query 5.
    of_queries[:, 5:] = M + 5
    for options, rows, unseen in (
        ({"attn_len": 4}, slice(None), M + 1 - 4),
        ({"first_key": of_stream}, 1, 17),
        ({"first_key": of_queries}, slice(None), 17),
    ):
        inputs = [x.to(backend.dtype) for x in operands(2, T, M, 1, 16)]
        with use_backend("skew" if backend.attend is skew.rel_attention else "triton"):
            through = backend._replace(attend=rel_attention)
            expected = through.output_and_gradients(inputs, **options)
            is_skew_alone = backend.attend is skew.rel_attention and "first_key" in options
            for x in inputs[1:3]:
                # The products of a CPU read and mask them.
                x[rows, :unseen] = 0 if is_skew_alone else torch.nan
            found = through.output_and_gradients(inputs, **options)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert not found[2][rows, :unseen].any()
        assert not found[3][rows, :unseen].any()


def test_a_query_that_sees_one_key_passes_nothing_through_its_weight(backend):
    inputs = [x.to(backend.dtype) for x in operands(2, 19, 5, 2, 16)]
    out, dq, dk, dv, *others = backend.output_and_gradients(inputs, attn_len=1)
    # A GPU multiplies and subtracts in one step, so the only weight is 1 but for its rounding.
    torch.testing.assert_close(out, inputs[2][:, 5:].double(), rtol=1e-6, atol=0)
    assert dv[:, 5:].norm() > 1
    assert not dv[:, :5].any()
    # Differences of sums that are equal but for the order in which they are added up.
    for gradient in (dq, dk, *others):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-5)


@pytest.mark.parametrize("T", [1, 19])
def test_the_layout_of_the_inputs_does_not_matter(backend, T):
    inputs = [x.to(backend.dtype) for x in operands(2, T, 6, 3, 8)]
    # As a memory keeps its keys (heads first, in a longer room), reversed, with gaps, expanded.
    room = inputs[0].new_full((3, 2, T + 12, 8), torch.nan)[:, :, 3 : T + 9]
    strided = [
        inputs[0].transpose(0, 1).contiguous().transpose(0, 1),
        room.copy_(inputs[1].permute(2, 0, 1, 3)).permute(1, 2, 0, 3),
        inputs[0].new_full((2, T + 6, 3, 16), torch.nan)[..., ::2].copy_(inputs[2]),
        inputs[3].permute(1, 2, 0).contiguous().permute(2, 0, 1),
        inputs[4][:1].expand(3, 8),
        inputs[5].T.contiguous().T,
        inputs[6].T.contiguous().T,
    ]
    inputs[4] = strided[4].contiguous()

    def attend(inputs):
        leaves = [x.detach().to(backend.device).requires_grad_() for x in inputs]
        with torch.no_grad():
            without_gradients = backend(*leaves, attn_len=15)
        out = backend(*leaves, attn_len=15)
        torch.testing.assert_close(without_gradients, out, rtol=0, atol=backend.error)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for one, other in zip(attend(strided), attend(inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=backend.error, atol=backend.error)


def test_some_inputs_may_need_no_gradient_and_all_are_left_as_they_were(backend):
    inputs = [x.to(backend.device, backend.dtype) for x in operands(1, 5, 4, 2, 8)]
    before = [x.clone() for x in inputs]
    options = {"attn_len": 7, "first_key": torch.tensor([2]), "dropout": 0.5}

    def attend(inputs):
        torch.manual_seed(5)
        return backend(*inputs, **options).square().sum()

    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(attend(leaves), leaves)
    assert not attend(inputs).requires_grad
    for n in range(7):
        leaf = inputs[n].clone().requires_grad_()
        mixed = [leaf if n == place else x for place, x in enumerate(inputs)]
        (found,) = torch.autograd.grad(attend(mixed), leaf)
        # Twice the same numbers give the same bits.
        assert torch.equal(found, expected[n])
    assert all(map(torch.equal, inputs, before))


def dropped_weights(backend, inputs, dropout):
    """The weights with and without dropout: values that are unit vectors bring them out."""
    B, S, H, _ = inputs[2].shape
    inputs = [x.to(backend.device, backend.dtype) for x in inputs[:6]]
    inputs[2] = torch.eye(S, dtype=backend.dtype, device=backend.device)[None, :, None]
    inputs[2] = inputs[2].expand(B, -1, H, -1)
    torch.manual_seed(9)
    return (backend(*inputs, dropout=p).cpu().double() for p in (dropout, 0.0))


def test_dropout_hides_single_weights_and_scales_the_others(backend):
    B, T, H, S, p = 4, 16, 3, 64, 0.25
    dropped, weights = dropped_weights(backend, operands(B, T, S - T, H, S), p)
    is_seen = weights[..., : S - T]
    is_kept = dropped[..., : S - T] != 0
    share = (weights / (1 - p))[dropped != 0]
    torch.testing.assert_close(dropped[dropped != 0], share, rtol=1e-5, atol=1e-9)
    # Five standard deviations of a share, and of the mean of all weights.
    assert is_seen.all()
    assert abs(is_kept.double().mean() - (1 - p)) < 5 * (p * (1 - p) / is_kept.numel()) ** 0.5
    deviation = (weights.square().sum() * p / (1 - p)) ** 0.5
    assert abs((dropped - weights).sum()) < 5 * deviation
    # Neighbours of each kind, in the memory that all queries see, share no chance.
    for axis in range(4):
        n = is_kept.shape[axis] - 1
        both = is_kept.narrow(axis, 0, n) & is_kept.narrow(axis, 1, n)
        share = (1 - p) ** 2
        # Pairs overlap, which makes their share vary up to three times as much.
        deviation = (3 * share * (1 - share) / both.numel()) ** 0.5
        assert abs(both.double().mean() - share) < 5 * deviation


@pytest.mark.parametrize("blocks", [(16, 16), (16, 32), (32, 32)], ids=str)
def test_dropout_gradients_are_those_of_what_was_computed(blocks, backend, monkeypatch):
    B, T, M, H, p = 2, 21, 11, 2, 0.375
    # As wide as there are keys, so that values can be unit vectors.
    inputs = operands(B, T, M, H, K=T + M)[:6]
    divide(monkeypatch, (blocks[0] // 4, 2 << 20))
    dropped, _ = dropped_weights(backend, inputs, p)
    kept = (dropped != 0).permute(0, 2, 1, 3) / (1 - p)
    # The mask is the same whatever the values are and however the kernels divide the work.
    divide_kernels(monkeypatch, *blocks)
    torch.manual_seed(9)
    found = backend.output_and_gradients([x.to(backend.dtype) for x in inputs], dropout=p)
    monkeypatch.setattr("torch.nn.functional.dropout", lambda weight, p: weight * kept.to(weight))
    exact = REFERENCE.output_and_gradients(inputs, dropout=p)
    for name, one, truth in zip(NAMES, found, exact, strict=False):
        assert (one - truth).norm() < 1e-5 * truth.norm(), name


def test_a_second_derivative_is_refused_rather_than_wrong(backend):
    inputs = operands(1, 3, 2, 1, 8)[:6]
    inputs = [x.to(backend.device, backend.dtype).requires_grad_() for x in inputs]
    out = backend(*inputs)
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|no autograd formula"):
        gradient.sum().backward()


@pytest.mark.parametrize("name", ["reference", "skew"])
def test_under_autocast_biases_of_the_distances_are_cast_with_the_rest(name):
    *inputs, bias = operands(2, 3, 4, 2, 8, dtype=torch.float32)
    with use_backend(name):
        exact = rel_attention(*inputs, distance_bias=bias)
        with torch.autocast("cpu", torch.bfloat16):
            found = rel_attention(*inputs, distance_bias=bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, rtol=0.05, atol=0.05)


def test_off_the_processor_a_block_has_one_softmax():
    started = Counter()

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            started[operation.overloadpacket] += 1
            return operation(*args, **(kwargs or {}))

    # A GPU takes longer to begin a kernel than it computes a matrix, and there are H times B. The
    # device that computes nothing stands for one.
    inputs = [x.to("meta").requires_grad_() for x in operands(6, 5, 9, 4, 3)[:6]]
    with Launches():
        skew.rel_attention(*inputs).sum().backward()
    # Forward, and once more for the backward pass.
    assert started[torch.ops.aten.softmax] == 2


@pytest.mark.parametrize("shorter", ["none", "streams", "queries"])
@pytest.mark.parametrize(("shape", "attn_len"), [*zip(SHAPES, ATTN_LENS, strict=True)], ids=str)
def test_without_positions_attention_is_by_content_alone(shape, attn_len, shorter):
    B, T, M, _, _ = shape
    masks = {"streams": first_keys(B, M), "queries": own_first_keys(B, T, M), "none": None}
    options = {"attn_len": attn_len, "first_key": masks[shorter]}

    def by_content(q, k, v, *nothing, distance_bias, **options):
        return attention(q, k, v, **options) + sum(x.sum() for x in nothing)

    inputs = operands(*shape)[:6]
    inputs[3:] = [torch.zeros_like(x) for x in inputs[3:]]
    found = Backend(by_content).output_and_gradients(inputs, **options)
    expected = REFERENCE.output_and_gradients(inputs, **options)
    for one, other in zip(found[:4], expected[:4], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_dropout_by_content_alone_hides_single_weights():
    B, S, p = 2000, 4, 0.25
    q, k = (torch.randn(1, n, 1, S).expand(B, -1, -1, -1) for n in (1, S))
    v = torch.eye(S)[None, :, None].expand(B, -1, -1, -1)
    weights, dropped = attention(q, k, v)[0], attention(q, k, v, dropout=p)
    is_kept = dropped > 0
    torch.testing.assert_close(dropped[is_kept], (weights / (1 - p)).expand_as(dropped)[is_kept])
    # Five standard deviations of a share.
    assert abs(is_kept.float().mean() - (1 - p)) < 5 * (p * (1 - p) / is_kept.numel()) ** 0.5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({0: (1, 6, 1, 2)}, "6 queries and 5 keys: the queries must be the last of the keys"),
        ({0: (1, 0, 1, 2)}, "0 queries and 5 keys"),
        ({3: (4, 1, 2)}, "5 keys need as many positions, not 4"),
        ({2: (1, 3, 1, 2)}, "5 keys need as many values, not 3"),
    ],
    ids=["more queries than keys", "no query", "positions", "values"],
)
def test_a_wrong_shape_is_named(wrong, message):
    inputs = operands(1, 2, 3, 1, 2)[:6]
    for place, shape in wrong.items():
        inputs[place] = torch.zeros(shape)
    with pytest.raises(ValueError, match=message):
        unwrap(rel_attention)(*inputs)
    if 3 not in wrong:
        with pytest.raises(ValueError, match=message):
            unwrap(attention)(*inputs[:3])


def test_an_attention_length_is_at_least_one_and_may_be_beyond_all_keys():
    inputs = operands(1, 2, 3, 1, 2)[:6]
    for attn_len in (5, 2**63, 2**64):
        assert torch.equal(rel_attention(*inputs, attn_len=attn_len), rel_attention(*inputs))
        assert torch.equal(attention(*inputs[:3], attn_len=attn_len), attention(*inputs[:3]))
    for attend in (
        lambda n: rel_attention(*inputs, attn_len=n),
        lambda n: attention(*inputs[:3], attn_len=n),
    ):
        with pytest.raises(ValueError, match="attn_len=0 must be at least 1"):
            attend(0)


def test_what_the_kernels_cannot_compute_is_named(monkeypatch):
    inputs = operands(1, 2, 2, 1, 8, dtype=torch.float32)[:6]
    attend = unwrap(kernels.rel_attention)
    monkeypatch.setattr(kernels, "find_spec", lambda name: True)
    monkeypatch.setattr(kernels, "_is_interpreted", lambda: False)
    with pytest.raises(ValueError, match="tensors on cpu: the triton backend needs a CUDA device"):
        kernels._check(*inputs[:4])
    with pytest.raises(ValueError, match="computes float16, bfloat16 or float32"):
        kernels._check(*[x.double() for x in inputs[:4]])
    with pytest.raises(ValueError, match=r"float32 queries, torch\.float16 keys"):
        kernels._check(inputs[0], inputs[1].half(), *inputs[2:4])
    with pytest.raises(ValueError, match="width 129: the triton backend computes up to 128"):
        kernels._check(*operands(1, 2, 2, 1, 129, dtype=torch.float32)[:4])
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install triton"):
        attend(*inputs)
