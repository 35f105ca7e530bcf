"""The reference is the formula of the paper, and nothing else is."""

import math

import pytest
import torch

from transformer_xl.ops.reference import rel_attention, rel_shift

# Streams, queries, remembered, heads, width.
SHAPES = [(1, 1, 0, 1, 1), (2, 1, 4, 2, 3), (1, 4, 0, 2, 2), (2, 3, 5, 2, 3), (1, 5, 2, 3, 1)]


def operands(B, T, M, H, K):
    shapes = [(B, T, H, K), (B, M + T, H, K), (B, M + T, H, K), (M + T, H, K), (H, K), (H, K)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def pair_by_pair(q, k, v, r, u, w, attn_len=None, first_key=None, distance_bias=None):
    """Section 3.3 of the paper, one query and one key at a time."""
    B, T, H, K = q.shape
    S = k.shape[1]
    out = torch.zeros_like(q)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                i = S - T + t
                first = 0 if first_key is None else int(first_key.view(B, -1).expand(B, T)[b, t])
                seen = range(first, i + 1)
                seen = [j for j in seen if attn_len is None or i - j < attn_len]
                scores = []
                for j in seen:
                    r_ij = r[S - 1 - (i - j), h]
                    query, key = q[b, t, h], k[b, j, h]
                    four = query @ key, query @ r_ij, u[h] @ key, w[h] @ r_ij
                    bias = 0 if distance_bias is None else distance_bias[S - 1 - (i - j), h]
                    scores.append(float(sum(four) + bias) / math.sqrt(K))
                total = sum(math.exp(score) for score in scores)
                for j, score in zip(seen, scores, strict=True):
                    out[b, t, h] += math.exp(score) / total * v[b, j, h]
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_the_reference_is_the_papers_sum_pair_by_pair(shape):
    inputs = operands(*shape)
    for attn_len in (None, 1, 2, 4, 100):
        expected = pair_by_pair(*inputs, attn_len=attn_len)
        found = rel_attention(*inputs, attn_len=attn_len)
        torch.testing.assert_close(found, expected, msg=f"attn_len={attn_len}")


@pytest.mark.parametrize("attn_len", [None, 3])
@pytest.mark.parametrize("first_key", [[0, 5], [[0, 2, 7, 8], [5, 6, 6, 3]]], ids=str)
@torch.no_grad()
def test_first_keys_and_biases_of_distances_are_those_of_the_sum(attn_len, first_key):
    inputs = operands(2, 4, 5, 2, 3)
    bias = torch.randn(9, 2, dtype=torch.float64)
    first_key = torch.tensor(first_key)
    options = {"attn_len": attn_len, "first_key": first_key, "distance_bias": bias}
    torch.testing.assert_close(rel_attention(*inputs, **options), pair_by_pair(*inputs, **options))


def test_the_gradients_are_those_of_the_formula():
    first_key = torch.tensor([1])

    def attend(*inputs):
        return rel_attention(*inputs, attn_len=2, first_key=first_key)

    assert torch.autograd.gradcheck(attend, operands(1, 2, 1, 1, 2))


def test_the_shift_does_what_its_drawing_shows():
    drawn = torch.tensor([[[[2, 1, 0], [12, 11, 10], [22, 21, 20]]]]).float()
    shifted = rel_shift(drawn)[0, 0]
    assert shifted.tril().tolist() == [[0, 0, 0], [11, 10, 0], [22, 21, 20]]


@torch.no_grad()
def test_half_precision_is_normalized_in_float32():
    # 3,000 equal weights: in bfloat16 their sum would stop growing at 256.
    S = 3000
    zeros, ones = torch.zeros(1, S, 1, 2).bfloat16(), torch.ones(1, S, 1, 2).bfloat16()
    out = rel_attention(zeros[:, :1], zeros, ones, zeros[0], zeros[0, 0], zeros[0, 0])
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0.01, atol=0)
