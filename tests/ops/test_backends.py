"""Whatever is faster than the reference gives the numbers of the reference."""

import itertools
from collections import Counter
from inspect import unwrap

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_xl.ops import (
    attention,
    rel_attention,
    skew,
    use_backend,
)

# What computes on every machine; the kernels for a GPU have tests of their own.
PORTABLE = ("reference", "skew")
NAMES = ("output", "q", "k", "v", "r", "content_bias", "position_bias", "distance_bias")
# Streams, queries, remembered, heads, width.
SHAPES = [(1, 1, 0, 1, 1), (2, 1, 6, 3, 4), (2, 7, 0, 3, 5), (3, 5, 9, 2, 3), (1, 9, 3, 3, 2)]
# Most queries of a block, bytes of a group: one block and group; blocks with a rest of one, of
# two; every head alone; three heads as two and one.
BLOCKS = [(128, 2 << 20), (4, 2 << 20), (3, 2 << 20), (2, 1), (3, 2 * 2 * 3 * 14 * 8)]
ATTN_LENS = [None, 1, 2, 6, 100]
# A Latin square: each pair of a shape, a size of blocks and an attention length.
PAIRS = [
    (shape, blocks, ATTN_LENS[(row + column) % 5])
    for row, shape in enumerate(SHAPES)
    for column, blocks in enumerate(BLOCKS)
]


@pytest.fixture(params=BLOCKS, ids=str)
def blocks(request, monkeypatch):
    monkeypatch.setattr(skew, "QUERY_BLOCK", request.param[0])
    monkeypatch.setattr(skew, "GROUP_BYTES", request.param[1])


def operands(B, T, M, H, K, dtype=torch.float64):
    S = M + T
    shapes = [(B, T, H, K), (B, S, H, K), (B, S, H, K), (S, H, K), (H, K), (H, K)]
    # Drawn in one precision: in every other one they are the same numbers, rounded.
    return [torch.randn(shape).to(dtype) for shape in shapes]


def output_and_gradients(backend, inputs, **options):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    if len(leaves) > 6:
        options["distance_bias"] = leaves[6]
    with use_backend(backend):
        out = rel_attention(*leaves[:6], **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    out.backward(weights.to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves)]


def assert_equal_to_reference(inputs, **options):
    expected = output_and_gradients("reference", inputs, **options)
    ours = output_and_gradients("skew", inputs, **options)
    for name, one, other in zip(NAMES[: len(ours)], ours, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


def first_keys(B, M):
    return torch.linspace(0, M, B).round().long()


def test_memory_nobody_wrote_reads_as_nan_in_this_folder():
    assert torch.empty(3).isnan().all()


@pytest.mark.parametrize(("shape", "blocks", "attn_len"), PAIRS, indirect=["blocks"], ids=str)
@pytest.mark.usefixtures("blocks")
def test_output_and_gradients_are_those_of_the_reference(shape, attn_len):
    B, T, M, H, _ = shape
    with_bias = [*operands(*shape), torch.randn(M + T, H, dtype=torch.float64)]
    masks = (None, first_keys(B, M), own_first_keys(B, T, M))
    for first_key, inputs in itertools.product(masks, (with_bias[:6], with_bias)):
        assert_equal_to_reference(inputs, attn_len=attn_len, first_key=first_key)


def own_first_keys(B, T, M):
    """For each query any key up to its own, which some of them begin with."""
    own = torch.arange(M, M + T)
    drawn = (torch.rand(B, T) * (own + 1)).long()
    return torch.where(torch.rand(B, T) < 0.3, own, drawn)


@pytest.mark.parametrize("backend", PORTABLE)
def test_a_first_key_of_all_queries_is_that_of_each(backend):
    inputs, first_key = operands(3, 4, 5, 2, 3), torch.tensor([0, 2, 5])
    expected = output_and_gradients(backend, inputs, first_key=first_key)
    each = first_key[:, None].expand(-1, 4)
    for one, other in zip(
        output_and_gradients(backend, inputs, first_key=each), expected, strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", PORTABLE)
def test_under_autocast_biases_of_the_distances_are_cast_with_the_rest(backend):
    inputs = operands(2, 3, 4, 2, 8, dtype=torch.float32)
    bias = torch.randn(7, 2)
    with use_backend(backend):
        exact = rel_attention(*inputs, distance_bias=bias)
        with torch.autocast("cpu", torch.bfloat16):
            found = rel_attention(*inputs, distance_bias=bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("shape", "attn_len", "shorter"),
    [
        (shape, attn_len, ("none", "streams", "queries")[(row + column) % 3])
        for row, shape in enumerate(SHAPES)
        for column, attn_len in enumerate([None, 1, 3, 100])
    ],
    ids=str,
)
def test_without_positions_attention_is_by_content_alone(shape, attn_len, shorter):
    first_key = first_keys(shape[0], shape[2]) if shorter == "streams" else None
    first_key = own_first_keys(*shape[:3]) if shorter == "queries" else first_key
    q, k, v, *positions = (x.requires_grad_() for x in operands(*shape))
    nothing = [torch.zeros_like(x) for x in positions]
    with use_backend("reference"):
        expected = rel_attention(q, k, v, *nothing, attn_len=attn_len, first_key=first_key)
    found = attention(q, k, v, attn_len=attn_len, first_key=first_key)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(found)
    gradients = (torch.autograd.grad(out, (q, k, v), weights) for out in (found, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_dropout_by_content_alone_hides_single_weights():
    B, S, p = 2000, 4, 0.25
    q, k = (torch.randn(1, n, 1, S).expand(B, -1, -1, -1) for n in (1, S))
    v = torch.eye(S)[None, :, None].expand(B, -1, -1, -1)
    weights, dropped = attention(q, k, v)[0], attention(q, k, v, dropout=p)
    is_kept = dropped > 0
    torch.testing.assert_close(dropped[is_kept], (weights / (1 - p)).expand_as(dropped)[is_kept])
    # Five standard deviations of a share.
    n = is_kept.numel()
    assert abs(is_kept.float().mean() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5


@pytest.mark.parametrize("attn_len", [None, 50, 140])
@pytest.mark.parametrize("T", [127, 128, 129, 130, 257])
def test_no_length_around_the_blocks_is_special(T, attn_len):
    assert_equal_to_reference(operands(1, T, 20, 2, 3), attn_len=attn_len)


@pytest.mark.parametrize(
    ("shape", "attn_len", "dtype"),
    [
        (shape, attn_len, (torch.float32, torch.bfloat16)[(row + column) % 2])
        for row, shape in enumerate(
            [(16, 1, 67, 2, 16), (2, 37, 0, 2, 16), (2, 53, 41, 3, 8), (1, 301, 99, 2, 32)]
        )
        for column, attn_len in enumerate([None, 1, 30, 150])
    ],
    ids=str,
)
def test_the_error_is_at_most_twice_that_of_the_reference(shape, attn_len, dtype):
    inputs = operands(*shape, dtype=dtype)
    options = {"attn_len": attn_len, "first_key": first_keys(shape[0], shape[2])}
    exact = output_and_gradients("reference", [x.double() for x in inputs], **options)
    plain = output_and_gradients("reference", inputs, **options)
    fast = output_and_gradients("skew", inputs, **options)
    for name, truth, one, other in zip(NAMES[:7], exact, fast, plain, strict=True):
        assert one.dtype == dtype
        error, allowed = ((x.double() - truth).norm() for x in (one, other))
        assert error <= 2 * allowed, f"{name}: {error:.3g}, the reference {allowed:.3g}"


@pytest.mark.parametrize("backend", PORTABLE)
def test_keys_beyond_the_attention_length_take_part_in_nothing(backend):
    q, k, v, r, u, w = operands(2, 3, 6, 2, 4)
    expected = output_and_gradients(backend, [q, k, v, r, u, w], attn_len=4)
    # The first query sees the keys from the third on.
    for x in (k[:, :3], v[:, :3], r[:3]):
        x.fill_(torch.nan)
    found = output_and_gradients(backend, [q, k, v, r, u, w], attn_len=4)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert not found[2][:, :3].any()


@pytest.mark.parametrize("backend", PORTABLE)
@pytest.mark.usefixtures("blocks")
def test_without_gradients_the_result_is_the_same(backend):
    for T, dropout in itertools.product((1, 7), (0.0, 0.5)):
        inputs = operands(2, T, 6, 3, 4)
        torch.manual_seed(7)
        expected, *_ = output_and_gradients(backend, inputs, attn_len=5, dropout=dropout)
        for x in inputs:
            x.requires_grad_()
        torch.manual_seed(7)
        with use_backend(backend), torch.no_grad():
            out = rel_attention(*inputs, attn_len=5, dropout=dropout)
        assert not out.requires_grad
        assert torch.equal(out, expected), f"T={T} dropout={dropout}"


@pytest.mark.parametrize("T", [1, 7])
@pytest.mark.usefixtures("blocks")
def test_the_layout_of_the_inputs_does_not_matter(T):
    inputs = operands(2, T, 6, 3, 4)
    # As a memory keeps its keys (heads first, in a longer room), reversed, with gaps, expanded.
    heads_first = torch.zeros(3, 2, T + 12, 4, dtype=torch.float64)[:, :, 3 : T + 9]
    heads_first.copy_(inputs[1].permute(2, 0, 1, 3))
    gaps = torch.zeros(2, T + 6, 3, 8, dtype=torch.float64)[..., ::2].copy_(inputs[2])
    strided = [
        inputs[0].transpose(0, 1).contiguous().transpose(0, 1),
        heads_first.permute(1, 2, 0, 3),
        gaps,
        inputs[3].permute(1, 2, 0).contiguous().permute(2, 0, 1),
        inputs[4][:1].expand(3, 4),
        inputs[5].T.contiguous().T,
    ]
    inputs[4] = strided[4].contiguous()
    for options in ({}, {"attn_len": 4}):
        with use_backend("skew"), torch.no_grad():
            found = rel_attention(*strided, **options)
            torch.testing.assert_close(found, rel_attention(*inputs, **options))
        leaves = [x.detach().requires_grad_() for x in strided]
        with use_backend("skew"):
            rel_attention(*leaves, **options).sum().backward()
        with use_backend("reference"):
            expected = torch.autograd.grad(rel_attention(*leaves, **options).sum(), leaves)
        for leaf, gradient in zip(leaves, expected, strict=True):
            torch.testing.assert_close(leaf.grad, gradient)


@pytest.mark.parametrize("backend", PORTABLE)
@pytest.mark.parametrize("T", [1, 5])
def test_the_inputs_are_left_as_they_were(backend, T):
    inputs = [x.requires_grad_() for x in operands(2, T, 3, 2, 4)]
    before = [x.detach().clone() for x in inputs]
    with use_backend(backend):
        out = rel_attention(*inputs, attn_len=3, first_key=torch.tensor([0, 2]), dropout=0.5)
    out.sum().backward()
    for x, y in zip(inputs, before, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("backend", PORTABLE)
def test_some_inputs_may_need_no_gradient(backend):
    inputs = operands(1, 3, 2, 2, 3)
    expected = output_and_gradients(backend, inputs)
    inputs[1].requires_grad_()
    with use_backend(backend):
        weights = torch.linspace(-1, 1, expected[0].numel()).view(expected[0].shape)
        rel_attention(*inputs).backward(weights.double())
    torch.testing.assert_close(inputs[1].grad, expected[2], rtol=1e-6, atol=1e-6)
    assert all(x.grad is None for n, x in enumerate(inputs) if n != 1)


@pytest.mark.parametrize("backend", PORTABLE)
def test_dropout_gradients_are_those_of_what_was_computed(backend, monkeypatch):
    monkeypatch.setattr(skew, "QUERY_BLOCK", 2)
    inputs = [x.requires_grad_() for x in operands(1, 3, 1, 2, 2)]

    def attend(*inputs):
        torch.manual_seed(3)
        with use_backend(backend):
            return rel_attention(*inputs, attn_len=3, dropout=0.4)

    assert torch.autograd.gradcheck(attend, inputs)
    assert not torch.equal(attend(*inputs), rel_attention(*inputs, attn_len=3))


@pytest.mark.parametrize("backend", PORTABLE)
def test_dropout_hides_single_weights_and_scales_the_others(backend):
    B, M, p = 3000, 3, 0.25
    q, k, _, r, u, w = operands(1, 1, M, 2, M + 1)
    # Values that are the unit vectors make the output the weights themselves.
    v = torch.eye(M + 1, dtype=torch.float64)[None, :, None].repeat(B, 1, 2, 1).requires_grad_()
    q, k = q.expand(B, -1, -1, -1), k.expand(B, -1, -1, -1)
    with use_backend(backend):
        weights = rel_attention(q, k, v, r, u, w)[:1].detach()
        dropped = rel_attention(q, k, v, r, u, w, dropout=p)
    is_kept = dropped > 0
    torch.testing.assert_close(dropped[is_kept], (weights / (1 - p)).expand_as(dropped)[is_kept])
    # Five standard deviations of a share, and of a mean.
    n = is_kept.numel()
    assert abs(is_kept.double().mean() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5
    deviation = weights * (p / (1 - p) / B) ** 0.5
    assert ((dropped.mean(0, keepdim=True) - weights).abs() < 5 * deviation).all()

    dropped.sum().backward()
    expected = dropped.detach().permute(0, 3, 2, 1).expand_as(v)
    torch.testing.assert_close(v.grad, expected)
    assert (v.grad[~is_kept.permute(0, 3, 2, 1).expand_as(v)] == 0).all()


def test_a_second_derivative_is_refused_rather_than_wrong():
    inputs = [x.requires_grad_() for x in operands(1, 3, 2, 1, 2)]
    with use_backend("skew"):
        out = rel_attention(*inputs)
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


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
    inputs = operands(1, 2, 3, 1, 2)
    for place, shape in wrong.items():
        inputs[place] = torch.zeros(shape)
    with pytest.raises(ValueError, match=message):
        unwrap(rel_attention)(*inputs)
    if 3 not in wrong:
        with pytest.raises(ValueError, match=message):
            unwrap(attention)(*inputs[:3])


@pytest.mark.parametrize("attn_len", [5, 2**63, 2**64])
def test_an_attention_length_beyond_the_keys_hides_none(attn_len):
    q, k, v, *_ = operands(1, 2, 3, 1, 2)
    assert torch.equal(attention(q, k, v, attn_len=attn_len), attention(q, k, v))


@pytest.mark.parametrize("attn_len", [0, -1])
def test_an_attention_length_below_one_is_named(attn_len):
    inputs = operands(1, 2, 3, 1, 2)
    with pytest.raises(ValueError, match=f"attn_len={attn_len} must be at least 1"):
        rel_attention(*inputs, attn_len=attn_len)
    with pytest.raises(ValueError, match=f"attn_len={attn_len} must be at least 1"):
        attention(*inputs[:3], attn_len=attn_len)


def test_off_the_processor_a_block_has_one_softmax():
    started = Counter()

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            started[operation.overloadpacket] += 1
            return operation(*args, **(kwargs or {}))

    # A GPU takes longer to begin a kernel than it computes a matrix, and there are H times B. The
    # device that computes nothing stands for one.
    inputs = [x.to("meta").requires_grad_() for x in operands(6, 5, 9, 4, 3)]
    with Launches():
        skew.rel_attention(*inputs).sum().backward()
    # Forward, and once more for the backward pass.
    assert started[torch.ops.aten.softmax] == 2
