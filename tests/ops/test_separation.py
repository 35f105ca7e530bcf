"""Relative attention without any shift gives the same numbers: an oracle of another make.

The sine and cosine of a difference are sums of products, so the position term separates. With
``a_i = W_r^T (q_i + v)``, whose halves ``s_i`` and ``c_i`` meet the sines and the cosines of a
distance, and with the angles ``x_i`` and ``y_j`` of the places of query and key:

    a_i . R_{i-j} = (s_i sin x_i + c_i cos x_i) . cos y_j + (c_i sin x_i - s_i cos x_i) . sin y_j

No term knows a distance: there is nothing to shift, to skew or to turn.
"""

from importlib.util import find_spec

import pytest
import torch

from transformer_xl.model.positions import frequencies, relative_positions
from transformer_xl.ops import rel_attention, use_backend

NAMES = ("output", "q", "k", "v", "W_r", "content_bias", "position_bias")
D = 12


def operands(B, T, M, H, K):
    shapes = [(B, T, H, K), (B, M + T, H, K), (B, M + T, H, K), (H, K, D), (H, K), (H, K)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def separated(q, k, v, r_weight, content_bias, position_bias, attn_len, first_key):
    T, S, K = q.shape[1], k.shape[1], q.shape[3]
    key = torch.arange(S)
    query = key[S - T :]
    angle = torch.outer(key.double(), frequencies(D).double())
    sine, cosine = angle.sin(), angle.cos()
    own_sine, own_cosine = sine[query, None], cosine[query, None]
    a_BTHD = torch.einsum("bthk,hkd->bthd", q + position_bias, r_weight)
    s, c = a_BTHD.chunk(2, -1)
    position = torch.einsum("bthd,sd->bhts", s * own_sine + c * own_cosine, cosine)
    position += torch.einsum("bthd,sd->bhts", c * own_sine - s * own_cosine, sine)
    content = torch.einsum("bthk,bshk->bhts", q + content_bias, k)
    far = query[:, None] - key
    seen = (far >= 0) & (far < attn_len) & (key >= first_key[:, None, None, None])
    weight = ((content + position) / K**0.5).where(seen, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshk->bthk", weight, v)


def shifted(q, k, v, r_weight, content_bias, position_bias, attn_len, first_key):
    encoding = relative_positions(k.shape[1], D, None, torch.float64, torch.device("cpu"))
    r = torch.einsum("sd,hkd->shk", encoding.to(q), r_weight)
    return rel_attention(
        q, k, v, r, content_bias, position_bias, attn_len=attn_len, first_key=first_key
    )


def output_and_gradients(attend, inputs, *options):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*leaves, *options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights.to(out))]


GPU = pytest.param(("triton", "cuda"), marks=pytest.mark.gpu)


@pytest.fixture(params=[("reference", "cpu"), ("skew", "cpu"), ("triton", "cpu"), GPU], ids=str)
def backend(request):
    """Compute the operation in a way and a place."""
    name, device = request.param
    if name == "triton":
        if find_spec("triton") is None:
            pytest.skip("needs Triton")
        from triton import knobs

        if knobs.runtime.interpret == (device == "cuda"):
            pytest.skip("runs in Triton's interpreter with TRITON_INTERPRET=1, on a GPU without it")
    with use_backend(name):
        yield name, device


@pytest.mark.parametrize("shape", [(2, 1, 20, 2, 4), (2, 9, 0, 2, 3), (3, 13, 22, 1, 5)], ids=str)
def test_what_separates_is_what_is_shifted(shape, backend):
    B, _, M, _, _ = shape
    inputs, first_key = operands(*shape), torch.linspace(M, 0, B).round().long()
    way, device = backend
    # The kernels compute nothing more exact than float32.
    dtype, allowed = (torch.float32, 1e-5) if way == "triton" else (torch.float64, 1e-12)
    there = [x.to(device, dtype) for x in inputs]
    for attn_len in (100, 7):
        exact = output_and_gradients(separated, inputs, attn_len, first_key)
        found = output_and_gradients(shifted, there, attn_len, first_key.to(device))
        for name, one, truth in zip(NAMES, found, exact, strict=True):
            error = (one.cpu().double() - truth).norm() / truth.norm()
            assert error < allowed, f"{name}, attn_len={attn_len}: {error:.3g}"
