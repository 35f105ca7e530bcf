"""The reference is the formula of the paper, and nothing else is."""

import math

import pytest
import torch

from transformer_xl.ops.reference import masked_keys, rel_attention, rel_shift

# Streams, queries, remembered, heads, width.
SHAPES = [(1, 1, 0, 1, 1), (2, 1, 4, 2, 3), (1, 4, 0, 2, 2), (2, 3, 5, 2, 3), (1, 5, 2, 3, 1)]


def operands(B, T, M, H, K):
    shapes = [(B, T, H, K), (B, M + T, H, K), (B, M + T, H, K), (M + T, H, K), (H, K), (H, K)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def pair_by_pair(q, k, v, r, u, w, attn_len=None, first_key=None):
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
                    scores.append(float(sum(four)) / math.sqrt(K))
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
@torch.no_grad()
def test_each_stream_sees_the_keys_from_its_first_one_on(attn_len):
    inputs = operands(4, 3, 5, 2, 3)
    first_key = torch.tensor([0, 1, 4, 5])
    options = {"attn_len": attn_len, "first_key": first_key}
    torch.testing.assert_close(rel_attention(*inputs, **options), pair_by_pair(*inputs, **options))


@pytest.mark.parametrize("attn_len", [None, 3])
@torch.no_grad()
def test_each_query_sees_the_keys_from_its_own_first_one_on(attn_len):
    inputs = operands(2, 4, 5, 2, 3)
    first_key = torch.tensor([[0, 2, 7, 8], [5, 6, 6, 3]])
    options = {"attn_len": attn_len, "first_key": first_key}
    torch.testing.assert_close(rel_attention(*inputs, **options), pair_by_pair(*inputs, **options))


@torch.no_grad()
def test_a_first_key_is_the_same_as_fewer_keys():
    q, k, v, r, u, w = operands(1, 3, 5, 2, 3)
    hidden = rel_attention(q, k, v, r, u, w, first_key=torch.tensor([4]))
    torch.testing.assert_close(hidden, rel_attention(q, k[:, 4:], v[:, 4:], r[4:], u, w))


@torch.no_grad()
def test_with_an_attention_length_of_one_a_query_sees_itself_alone():
    q, k, v, r, u, w = operands(2, 3, 4, 2, 5)
    torch.testing.assert_close(rel_attention(q, k, v, r, u, w, attn_len=1), v[:, 4:])


def test_the_gradients_are_those_of_the_formula():
    first_key = torch.tensor([1])

    def attend(*inputs):
        return rel_attention(*inputs, attn_len=2, first_key=first_key)

    assert torch.autograd.gradcheck(attend, operands(1, 2, 1, 1, 2))


def test_a_far_key_gets_no_gradient():
    inputs = operands(1, 2, 3, 1, 2)
    rel_attention(*inputs, attn_len=2).sum().backward()
    _, k, v, r, _, _ = inputs
    for seen, unseen in ((k.grad[:, 2:], k.grad[:, :2]), (v.grad[:, 2:], v.grad[:, :2])):
        assert (unseen == 0).all()
        assert (seen != 0).all()
    assert (r.grad[:3] == 0).all()
    assert (r.grad[3:] != 0).all()


def test_the_shift_does_what_its_drawing_shows():
    drawn = torch.tensor([[[[2, 1, 0], [12, 11, 10], [22, 21, 20]]]]).float()
    shifted = rel_shift(drawn)[0, 0]
    assert shifted.tril().tolist() == [[0, 0, 0], [11, 10, 0], [22, 21, 20]]


@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 5), (2, 2), (3, 7), (6, 6)])
def test_the_shift_brings_each_distance_to_its_key(T, S):
    # Every column holds its distance, and every row adds its own thousand.
    distance_S = torch.arange(S - 1, -1, -1.0)
    x_BHTS = (distance_S + 1000 * torch.arange(T)[:, None]).expand(2, 3, T, S)
    shifted = rel_shift(x_BHTS)
    for t in range(T):
        for j in range(S - T + t + 1):
            assert (shifted[:, :, t, j] == 1000 * t + (S - T + t - j)).all()


def test_what_is_hidden_is_the_future_and_what_is_too_far():
    rows = ["0001", "0000"]
    assert masked_keys(2, 4, None, torch.device("cpu")).int().tolist() == [
        [int(x) for x in row] for row in rows
    ]
    rows = ["1001", "1100"]
    assert masked_keys(2, 4, 2, torch.device("cpu")).int().tolist() == [
        [int(x) for x in row] for row in rows
    ]


@torch.no_grad()
def test_half_precision_is_normalized_in_float32():
    # 3,000 equal weights: in bfloat16 their sum would stop growing at 256.
    S = 3000
    zeros, ones = torch.zeros(1, S, 1, 2).bfloat16(), torch.ones(1, S, 1, 2).bfloat16()
    out = rel_attention(zeros[:, :1], zeros, ones, zeros[0], zeros[0, 0], zeros[0, 0])
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0.01, atol=0)
